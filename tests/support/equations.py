"""The equations of Gekko, the later Gecko and the paper's own text, in plain loops.

They use nothing of the package but the names of the parameters: one row, one token after the other, float64.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from support import cases
from torch import Tensor

from gecko.config import GeckoConfig

LENGTH = 5 * cases.CHUNK + 3


@contextmanager
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def softplus(x: Tensor) -> Tensor:
    return torch.log2(1 + 2**x)


class Equations:
    """The model of a config, of its parameters ``p``."""

    def __init__(self, config: GeckoConfig, p: dict[str, Tensor], starts: tuple[int, ...]) -> None:
        self.c, self.p, self.starts = config, p, starts
        self.start = [max(s for s in starts if s <= t) for t in range(LENGTH)]

    @in_float64()
    def logits(self, tokens: list[int]) -> Tensor:
        x = self.p["embedding.weight"][tokens]
        for layer in range(self.c.num_layers):
            x = self.feed_forward(f"blocks.{layer}.feed_forward.", self.mixer(f"blocks.{layer}.mixer.", x))
        return self.timestep_norm("final_norm.", x) @ self.p["head.weight"].T

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.p[f"{name}.weight"].T + self.p.get(f"{name}.bias", torch.zeros(()))

    def timestep_norm(self, name: str, x: Tensor) -> Tensor:
        groups, (one, two), out = self.c.timestep_groups, self.c.timestep_betas or (0.0, 0.0), []
        for t in range(LENGTH):
            of_step = x[t].view(groups, -1)
            if t == self.start[t]:
                n, m, v = 0, torch.zeros(groups), torch.zeros(groups)
            n, m = n + 1, one * m + (1 - one) * of_step.mean(1)
            v = two * v + (1 - two) * of_step.var(1, unbiased=False)
            center, square = m / (1 - one**n), v / (1 - two**n) + (self.c.timestep_eps or self.c.norm_eps)
            out.append(((of_step - center[:, None]) / square[:, None].sqrt()).flatten())
        return torch.stack(out) * (1 + self.p[f"{name}weight"]) + self.p[f"{name}bias"]

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        grouped = x.view(LENGTH, self.c.norm_groups, -1)
        centred = grouped - grouped.mean(-1, keepdim=True)
        u = rms(centred, self.c.norm_eps).flatten(1) * (1 + self.p[f"{name}norm.weight"]) + self.p[f"{name}norm.bias"]
        hidden = torch.nn.functional.silu(self.linear(f"{name}fc1", u)) * self.linear(f"{name}fc3", u)
        return x + self.linear(f"{name}fc2", hidden)

    def mixer(self, name: str, x: Tensor) -> Tensor:
        c, p, silu = self.c, self.p, torch.nn.functional.silu
        heads, own, eps = c.num_heads, c.num_key_value_heads, c.rms_eps or c.norm_eps
        xn = self.timestep_norm(f"{name}norm.", x)
        mx = xn if c.local_mixing == "none" else self.average(name, xn)
        value = self.linear(f"{name}to_value", xn)
        if c.queries_and_keys == "separate":
            q, k = self.linear(f"{name}to_query", mx), self.linear(f"{name}to_key", mx)
            taps = p[f"{name}taps"].split([q.shape[1], k.shape[1], value.shape[1]])
            q, k, value = (self.convolve(y, tap) for y, tap in zip((q, k, value), taps, strict=True))
            memory_q, memory_k = q.view(LENGTH, heads, -1), k.view(LENGTH, own, -1)
            q = rms(memory_q, eps).flatten(1) * (1 + p[f"{name}query_norm.weight"]) / math.sqrt(c.key_head_dim)
            k = rms(memory_k, eps).flatten(1) * (1 + p[f"{name}key_norm.weight"])
            q, k = q.view(LENGTH, heads, -1), k.view(LENGTH, own, -1)
        else:
            z = self.linear(f"{name}to_shared", mx)
            of_head = z.view(LENGTH, heads, -1)
            unit = rms(z, eps) / math.sqrt(c.key_dim) if c.unit_vectors == "whole" else (
                rms(of_head, eps).flatten(1) / math.sqrt(c.key_head_dim))  # fmt: skip
            rows = [unit * (1 + p[f"{name}scale"][i]) + p[f"{name}offset"][i] for i in range(4)]
            q, k, memory_q, memory_k = (row.view(LENGTH, heads, -1) for row in rows)
        v = silu(value).view(LENGTH, own, -1)
        attended = self.attend(self.rotate(q), self.rotate(k), v)
        recalled, readable = self.recall(memory_q, memory_k, v)
        if f"{name}memory_factor" in p:
            recalled = recalled * p[f"{name}memory_factor"][:, None]
        if c.memory_gate_channels:
            g = self.linear(f"{name}to_memory_gate", mx).sigmoid() * readable[:, None]
            width = c.value_head_dim // c.memory_gate_channels
            g = g.view(LENGTH, heads, -1).repeat_interleave(width, -1)
            joined = attended + g * (recalled - attended)
        else:
            joined = attended + recalled
        joined = rms(joined, eps) if c.output_norm else joined
        gate = self.linear(f"{name}to_gate", mx)
        joined = joined.flatten(1) * (softplus(gate) if c.gate_activation == "softplus" else silu(gate))
        hidden = self.linear(f"{name}to_hidden", mx) if c.hidden_branch else 0
        return x + hidden + self.linear(f"{name}to_output", joined)

    def average(self, name: str, xn: Tensor) -> Tensor:
        p, modes = {key: self.p[f"{name}cema.{key}"] for key in ("alpha", "delta", "theta", "gamma")}, self.c.cema_modes
        weight, turns = p["alpha"].sigmoid(), p["theta"].sigmoid()[:, None] * torch.arange(1, modes + 1)
        q = torch.polar(1 - weight * p["delta"].sigmoid(), turns * 2 * math.pi / modes)
        weight = weight * self.p.get(f"{name}cema.beta", torch.ones(()))
        out, h = [], torch.zeros_like(q)
        for t in range(LENGTH):
            h = torch.zeros_like(q) if t == self.start[t] else h
            h = q * h + weight * xn[t][:, None]
            out.append((torch.view_as_complex(p["gamma"]) * h).real.sum(1) + xn[t])
        return rms(torch.stack(out), self.c.rms_eps or self.c.norm_eps) * (1 + self.p[f"{name}cema_norm.weight"])

    def convolve(self, x: Tensor, taps: Tensor) -> Tensor:
        weights, out = taps.softmax(1), torch.zeros_like(x)
        for t in range(LENGTH):
            for lag in range(taps.shape[1]):
                if t - lag >= self.start[t]:
                    out[t] += weights[:, -1 - lag] * x[t - lag]
        return out

    def rotate(self, x: Tensor) -> Tensor:
        size = self.c.key_head_dim
        default = [self.c.rope_base ** (-2 * i / size) for i in range(size // 2)]
        angles = torch.arange(LENGTH)[:, None] * torch.tensor(self.c.rope_frequencies or default)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        chunk, shared = self.c.chunk_size, q.shape[1] // k.shape[1]
        out = torch.zeros(LENGTH, q.shape[1], v.shape[2])
        for t in range(LENGTH):
            seen = range(max(self.start[t], (t // chunk - 1) * chunk), t + 1)
            for head in range(q.shape[1]):
                keys = k[seen.start : seen.stop, head // shared]
                out[t, head] = (keys @ q[t, head]).softmax(0) @ v[seen.start : seen.stop, head // shared]
        return out

    def recall(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the memory gives, and whether it holds something of the token's document."""
        c = self.c
        chunk, shared, heads = c.chunk_size, q.shape[1] // k.shape[1], k.shape[1]
        memory, log_z = torch.zeros(heads, k.shape[2], v.shape[2]), torch.full((heads, k.shape[2]), -torch.inf)
        document, out, readable = None, torch.zeros(LENGTH, q.shape[1], v.shape[2]), torch.zeros(LENGTH)
        for u in range(-(-LENGTH // chunk)):
            if u >= 2:  # chunk u − 2 enters: those of its tokens that are of the document at its end
                end = (u - 1) * chunk
                if document != self.start[end - 1]:
                    memory, log_z = torch.zeros_like(memory), torch.full_like(log_z, -torch.inf)
                document = self.start[end - 1]
                tokens = range(max(document, end - chunk), end)
                old = memory.clone()
                for head in range(heads):
                    keys, values = (y[tokens.start : tokens.stop, head] for y in (k, v))
                    log_w = keys.logsumexp(0)
                    log_z[head] = torch.logaddexp(log_z[head], log_w)
                    rho = (log_w - log_z[head]).exp()[:, None]
                    answers = keys.softmax(1) @ old[head]
                    if c.memory == "orthogonal":
                        unit = rms(answers, 1e-6)
                        answers = (values * unit).sum(1, keepdim=True) / values.shape[1] * unit
                    written = keys.softmax(0).T @ (values - answers)
                    memory[head] = (1 - rho) * old[head] + rho * written
            for t in range(u * chunk, min(LENGTH, (u + 1) * chunk)):
                if document is not None and document == self.start[t]:
                    readable[t] = 1
                    for head in range(q.shape[1]):
                        out[t, head] = q[t, head].softmax(0) @ memory[head // shared]
        return out, readable
