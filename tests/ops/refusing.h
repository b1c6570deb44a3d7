// Included before every C file of a library under test: counts allocations, and refuses number ``refused_room``.
#pragma once

#include <stdint.h>
#include <stdlib.h>

__attribute__((weak)) int64_t rooms_asked, rooms_held, refused_room = -1;

__attribute__((weak)) void *room_or_none(size_t alignment, size_t size) {
    if (__atomic_fetch_add(&rooms_asked, 1, __ATOMIC_RELAXED) == refused_room) return 0;
    __atomic_fetch_add(&rooms_held, 1, __ATOMIC_RELAXED);
    return aligned_alloc(alignment, size);
}

__attribute__((weak)) void give_room(void *room) {
    if (room) __atomic_fetch_sub(&rooms_held, 1, __ATOMIC_RELAXED);
    free(room);
}

#define aligned_alloc room_or_none
#define free give_room
