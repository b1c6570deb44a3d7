"""Saving in the background while training continues, as far as one process can test it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

from gecko.parallel.mesh import Ranks
from gecko.train import Run
from gecko.train.checkpoints.checkpointer import Checkpointer
from gecko.train.metrics import DataRecord


def test_a_slow_disk_is_no_hang(small_run: Run) -> None:
    beat = Mock()
    with ThreadPoolExecutor(1) as disk, Checkpointer(small_run, Ranks(), beat, DataRecord("", 2)) as saver:
        saver._writing = disk.submit(time.sleep, 2.5)
        saver.wait()
    assert beat.call_count >= 2
