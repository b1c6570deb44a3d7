"""Gecko as a model of vLLM: its states are in vLLM's pages, its operators are ours."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.interfaces import HasInnerState, IsAttentionFree, SupportsMambaPrefixCaching

from gecko.config import GeckoConfig
from gecko.inference.packed_weights import Network, PackedWeights, decoder_of
from gecko.io.model_folder import GECKO, TIED, WRAPPERS, fitted, read_folder, weight_files
from gecko.io.quantization import is_quantized, pack, quantize, stored_bits, unpack
from gecko.layers import project
from gecko.models.gecko import Gecko
from gecko.parallel.sharding import TensorParallel, sharded_model, sharded_state, sharded_weight
from gecko.runtime.tensors import meta_device
from gecko.state import GeckoState
from gecko.vllm.pages import StatePages, StepMetadata


class GeckoForCausalLM(nn.Module, HasInnerState, IsAttentionFree, SupportsMambaPrefixCaching):
    """Gecko with its head. Sequences that read one token are read together, the others one by one.

    One token of all sequences is one call into C, or a graph of the Triton decoder, which change the pages in place. A
    piece of a prompt copies its state from the page and back; so do sequences of models that these cannot decode, such
    as those that tensor parallelism divides. For a step of the decoder the host does not wait for the GPU.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self._dtype, self._device = torch.get_default_dtype(), vllm_config.device_config.device
        self._ranks = TensorParallel(
            get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size(),
            tensor_model_parallel_all_reduce, tensor_model_parallel_all_gather,
        )  # fmt: skip
        self._model_config, self._is_loaded = vllm_config.model_config, False
        self._checked: Any = ()
        architecture = self.config.architecture()
        whole = self._ranks.size == 1
        with meta_device():
            self.gecko = Gecko(architecture) if whole else sharded_model(architecture, self._ranks)
        self.gecko.to(self._dtype).to_empty(device=self._device).requires_grad_(False).eval()
        self.gecko.tie()
        names = f"{prefix}.gecko.blocks" if prefix else "gecko.blocks"
        wide = torch.promote_types(self._dtype, torch.float32)
        blank = GeckoState.empty(self.gecko.config, dtype=wide, value_dtype=self._dtype, device="meta")
        blank = blank if whole else sharded_state(blank, self._ranks)
        self._pages = StatePages(blank, names, vllm_config.compilation_config.static_forward_context)
        self._most = vllm_config.scheduler_config.max_num_seqs
        self._decoder: tuple[GeckoState, Network | None] | None = None
        if self._device.type == "cpu":
            _keep_seeds_of_cut_prompts()

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        """Return how vLLM copies a state: the whole page of each block."""
        return (get_temporal_copy_spec,)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return the embedding of the tokens (T,), (T, D)."""
        return self.gecko.embedding(input_ids)

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        """Return the input of the head, (T, D), for the tokens (T,) of all sequences, and write their states. Raise
        ValueError if embeddings are given instead of tokens."""
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("prompts must be tokens or text: a Gecko in vLLM takes no embeddings.")
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # vLLM measures memory, or keeps an idle replica in step
            return self.gecko.hidden(torch.zeros_like(input_ids).unsqueeze(0))[0].squeeze(0)
        step: StepMetadata = metadata[self._pages.names[0]]
        if not any(step.read):  # vLLM was idle, when trainers write new values into the parameters
            self._decoder = None
        decoding = [row for row, length in enumerate(step.lengths) if length == 1 and step.read[row]]
        if len(decoding) == len(input_ids) == len(step.lengths):
            return self._decode(input_ids, positions, step.pages, step.read)
        rest = len(input_ids) - sum(step.lengths)
        tokens, places = (x.split([*step.lengths, rest]) for x in (input_ids, positions))
        decoded: dict[int, Tensor] = {}
        if decoding:  # rows are cut out and joined again: the host would wait until the device has an index of them
            ids, at, pages = (torch.cat([x[row] for row in decoding]) for x in (tokens, places, step.pages.split(1)))
            found = self._decode(ids, at, pages, [step.read[row] for row in decoding]).split(1)
            decoded = dict(zip(decoding, found, strict=True))
        parts = []
        for row, length in enumerate(step.lengths):
            if row in decoded:
                parts.append(decoded[row])
            elif length:
                part = self._read(tokens[row].unsqueeze(0), step.pages[row : row + 1], [step.read[row]])
                parts.append(part.squeeze(0))
        parts.append(torch.zeros(rest, self.gecko.config.model_dim, dtype=self._dtype, device=input_ids.device))
        return torch.cat(parts)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits (N, V) of some rows of ``forward``'s result."""
        return project(hidden_states, self.gecko.head)[0]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the weights of a model folder, or this rank's part of them; return the names of the loaded parameters.

        The first call needs all of them. Later ones, as trainers make, may have some, which are copied into vLLM's
        tensors. States in the prefix cache are those of the weights that read them until vLLM resets it. Raise
        ValueError if the folder is damaged, parameters are missing, unexpected or of another shape, or weights are
        quantised and tensor parallelism is on or the engine runs already.
        """
        self._decoder = None
        self._check_folder()
        stored = {}
        for wrapped, weight in weights:
            name = wrapped.removeprefix(next(filter(wrapped.startswith, WRAPPERS), ""))
            dtype = self._dtype if weight.is_floating_point() else weight.dtype
            # This rank's part, as a copy: the file's tensors are mapped from the disk.
            part = sharded_weight(name, weight, self._ranks).to(self._device, dtype, copy=True)
            stored[name] = part.contiguous()
        head, embedding = TIED
        if self.gecko.config.tie_embedding and embedding in stored:
            stored[head] = stored[embedding]
        bits = stored_bits(stored)
        parameters = dict(self.gecko.named_parameters(remove_duplicate=False))
        if bits is None and not any(map(is_quantized, parameters.values())):
            self._copy(stored, parameters)
        elif bits is None or self._ranks.size > 1 or self._is_loaded:
            raise ValueError(
                "a quantised model must be loaded when an engine starts, without tensor parallelism; this engine "
                f"{'has its weights' if self._is_loaded else f'has {self._ranks.size} ranks'}. Start another engine."
            )
        else:
            quantize(self.gecko, bits)
            blank = self.gecko.state_dict()
            stored = unpack(fitted("the model's folder", stored, pack(blank)), blank)
            self.gecko.load_state_dict(stored, strict=True, assign=True)
            self.gecko.tie()
        self._is_loaded = True
        return {f"gecko.{name}" for name in (stored if bits is None else parameters)}

    def _copy(self, stored: dict[str, Tensor], parameters: dict[str, nn.Parameter]) -> None:
        """Copy weights into the parameters, or give them to the loaders that vLLM has put there for a reload."""
        unknown, missing = stored.keys() - parameters.keys(), parameters.keys() - stored.keys()
        if unknown or (missing and not self._is_loaded):
            names = sorted(unknown or missing)
            raise ValueError(
                f"weights must be those of the model's config; {', '.join(names[:3])} is missing or unknown."
            )
        for name, weight in stored.items():
            parameter = parameters[name]
            if weight.shape != parameter.shape:
                raise ValueError(f"{name} must have shape {tuple(parameter.shape)}; got {tuple(weight.shape)}.")
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight)

    def _check_folder(self) -> None:
        """Check the model's files against their checksums and config, unless they are those that were checked."""
        folder = Path(self._model_config.model)
        found = tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in weight_files(folder))
        if found and found != self._checked:
            read_folder(folder, GeckoConfig, GECKO)
        self._checked = found

    def _read(self, tokens: Tensor, pages: Tensor, read: list[int]) -> Tensor:
        """Read tokens (R, T) of the sequences in ``pages`` (R,), which have read ``read``; return hidden (R, T, D)."""
        # Pages are not cleared when another sequence gets them.
        before = self._pages.gather(pages, read) if any(read) else None
        hidden, after = self.gecko.hidden(tokens, state=before)
        self._pages.write(pages, after)
        return hidden

    def _decode(self, tokens: Tensor, positions: Tensor, pages: Tensor, read: list[int]) -> Tensor:
        """Read one token (R,) of each of some sequences and return hidden (R, D). On a GPU with a network the host only
        launches: tokens, positions and pages stay on the device."""
        network = self._network()
        if network is not None:
            return network.hidden(tokens, pages, positions).to(self._dtype)
        return self._read(tokens.unsqueeze(1), pages, read).squeeze(1)

    def _network(self) -> Network | None:
        """Return the network that decodes on the current pages in C or Triton; None if none can."""
        state = self._pages.state()
        if self._decoder is None or self._decoder[0] is not state:
            backend = decoder_of(self.gecko, state) if self._ranks.size == 1 else None
            most = min(self._most, len(state.mixers[0].attention.keys))  # sequences of a step, each with a page
            network = None if backend is None else PackedWeights(self.gecko, backend).with_states(state, most)
            self._decoder = state, network
        return self._decoder[1]


def _keep_seeds_of_cut_prompts() -> None:
    """Draw for unfinished prompts without the generators of their requests.

    vLLM draws a token after each piece of a prompt, drops it, and takes the generator back. Those of a CPU cannot go
    back, which ended the engine.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as Runner

    if "_sample" in vars(Runner):
        return
    sample, keep_books = Runner._sample, Runner._bookkeeping_sync

    def sample_without(self: Any, *arguments: Any) -> Any:
        rows, batch = self.discard_request_mask.np, self.input_batch
        self.cut_generators = {row: batch.generators.pop(row) for row in list(batch.generators) if rows[row]}
        return sample(self, *arguments)

    def keep_books_without(self: Any, *arguments: Any, **named: Any) -> Any:
        kept = keep_books(self, *arguments, **named)
        self.input_batch.generators.update(self.cut_generators)
        return kept

    Runner._sample, Runner._bookkeeping_sync = sample_without, keep_books_without
