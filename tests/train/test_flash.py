"""The flash backend on a CPU, around a reference that refuses what the kernels do; in bfloat16, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_plugin.errors import LayoutError
from slime_plugin.record.arrays import IntArray, Span
from slime_plugin.train.attention import flash
from slime_plugin.train.attention.flash import attend_flash, flash_kernel
from slime_plugin.train.tree_plan import QueryBlock, TreePlan, plan_tree
from slime_plugin.verify import oracles
from slime_plugin.verify.generated import random_tree
from slime_plugin.verify.settings import LIMITS
from tests.train.flash_reference import flash_attention_2, flash_attention_3, use_flash
from tests.train.test_attention import PAPER, forests

LIMIT = LIMITS["bfloat16"]
BOTH = pytest.mark.parametrize("version", [2, 3])


@pytest.fixture(autouse=True)
def _no_kernel_is_kept() -> Iterator[None]:
    yield
    flash_kernel.cache_clear()


@dataclass(frozen=True)
class Row:
    """A row of trees, and the shape of what a rank computes of it."""

    parent: IntArray
    heads: int = 4
    groups: int = 2
    size: int = 64

    def tensors(self, window: Span, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key and value as Megatron's attention gives them, views into one matrix, and a gradient."""
        generator = torch.Generator().manual_seed(len(self.parent) + self.size)
        shape = (len(self.parent), self.groups, self.heads // self.groups * self.size)
        mixed = torch.randn(*shape[:2], shape[2] + 2 * self.size, generator=generator).bfloat16().to(device)
        query, key, value = torch.split(mixed, [shape[2], self.size, self.size], dim=-1)
        query = query.reshape(shape[0], self.heads, self.size)[slice(*window)]
        grad_out = torch.randn(query.shape, generator=generator).bfloat16().to(device)
        query, key, value = (x.detach().requires_grad_() for x in (query, key, value))
        return query, key, value, grad_out


def errors(row: Row, window: Span | None = None) -> tuple[float, float]:
    """Relative, of the output and of all gradients together."""
    window = window or (0, len(row.parent))
    query, key, value, grad_out = row.tensors(window)
    out = attend_flash(query, key, value, plan_tree(row.parent, window), row.size**-0.5)
    torch.autograd.backward(out, grad_out)
    visible = torch.from_numpy(oracles.path_sets(row.parent))[slice(*window)]
    right, *gradients = oracles.attention_gradients(query, key, value, visible, grad_out)
    found = torch.cat([x.grad.flatten() for x in (query, key, value) if x.grad is not None])
    return oracles.relative(out.detach(), right), oracles.relative(found, torch.cat([x.flatten() for x in gradients]))


def tree(tokens: int, segments: int, seed: int = 0) -> IntArray:
    return random_tree(tokens, segments, np.random.default_rng(seed))


def packed(*lengths: int) -> IntArray:
    """Chains one after the other."""
    return np.concatenate([np.arange(n) - 1 + sum(lengths[:i]) * (np.arange(n) > 0) for i, n in enumerate(lengths)])


ROWS = {
    "the running example": Row(PAPER),
    "a tree": Row(tree(300, 25)),
    "a chain": Row(packed(200)),
    "packed chains": Row(packed(50, 1, 120)),
    "branches of one token": Row(np.array([*range(-1, 39), *[39] * 60])),
    "one-token blocks only": Row(np.full(40, -1)),
    "tp: a key head for all": Row(tree(200, 15), heads=8, groups=1),
    "tp: as many key heads": Row(tree(200, 15), heads=2, groups=2),
    "heads as wide as Qwen3's": Row(tree(200, 15), size=128),
    "heads of no power of two": Row(tree(100, 9), size=72),
    "a long row": Row(tree(3000, 40), heads=2, groups=1),
}


@BOTH
@pytest.mark.parametrize("name", ROWS)
def test_a_tree_is_a_dense_softmax_in_float64(name: str, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_flash(monkeypatch, version)
    out, gradient = errors(ROWS[name])
    assert out <= LIMIT.attention
    assert gradient <= LIMIT.attention_gradient


@BOTH
@pytest.mark.parametrize("ranks", [2, 3])
def test_windows_of_context_parallel_ranks(ranks: int, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_flash(monkeypatch, version)
    for rank in range(ranks):
        out, gradient = errors(ROWS["a tree"], (rank * 300 // ranks, (rank + 1) * 300 // ranks))
        assert out <= LIMIT.attention
        assert gradient <= LIMIT.attention_gradient


@settings(max_examples=100)
@given(
    st.sampled_from([2, 3]), forests(), st.sampled_from([(4, 4), (4, 2), (3, 1)]), st.sampled_from([8, 24]), st.data()
)
def test_no_row_is_refused(
    version: int, parent: IntArray, heads: tuple[int, int], size: int, data: st.DataObject
) -> None:
    low = data.draw(st.integers(0, len(parent) - 1))
    window = low, data.draw(st.integers(low + 1, len(parent)))
    with pytest.MonkeyPatch.context() as patch:
        use_flash(patch, version)
        out, gradient = errors(Row(parent, *heads, size), window)
    assert out <= LIMIT.attention
    assert gradient <= LIMIT.attention_gradient


@BOTH
def test_a_wrong_tree_is_over_the_limits(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One branch hangs one token too high."""
    use_flash(monkeypatch, version)
    row = ROWS["the running example"]
    plan = plan_tree(np.where(np.arange(19) == 17, 13, PAPER))
    monkeypatch.setattr("tests.train.test_flash.plan_tree", lambda *_: plan)
    out, gradient = errors(row)
    assert out > 10 * LIMIT.attention
    assert gradient > 10 * LIMIT.attention_gradient


@BOTH
def test_packed_chains_are_the_stock_call(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_flash(monkeypatch, version)
    query, key, value, grad_out = ROWS["packed chains"].tensors((0, 171))
    out = attend_flash(query, key, value, plan_tree(packed(50, 1, 120)), 0.125)
    torch.autograd.backward(out, grad_out)
    bounds = [0, 50, 51, 171]
    stock, gradients = Call(query.detach(), key.detach(), value.detach(), grad_out, bounds, bounds).run(version)
    assert torch.equal(out, stock)
    for x, gradient in zip((query, key, value), gradients, strict=True):
        assert x.grad is not None
        assert torch.equal(x.grad, gradient)


@BOTH
def test_everything_is_on_the_device(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device without numbers, because what is forgotten on the host would be at home on the CPU."""
    use_flash(monkeypatch, version, "meta")
    for window in ((0, 300), (100, 200)):
        query, key, value, grad_out = ROWS["a tree"].tensors(window, "meta")
        out = attend_flash(query, key, value, plan_tree(ROWS["a tree"].parent, window), 0.125)
        torch.autograd.backward(out, grad_out)
        assert [x.grad.device.type for x in (query, key, value) if x.grad is not None] == ["meta"] * 3


@BOTH
def test_kernels_that_torch_has_wrapped(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As both libraries register them: torch then holds them to what they say of their arguments."""
    library = flash_attention_2() if version == 2 else flash_attention_3()
    for name, function in vars(library).items():
        mutated = ("dq", "dk", "dv") if name.endswith("backward") else ()
        wrapped = torch.library.custom_op(f"memorywalker_test_{version}::{name}", function, mutates_args=mutated)
        setattr(library, name, wrapped)
    monkeypatch.setattr(f"tests.train.flash_reference.flash_attention_{version}", lambda device: library)
    use_flash(monkeypatch, version)
    out, gradient = errors(ROWS["a tree"])
    assert out <= LIMIT.attention
    assert gradient <= LIMIT.attention_gradient


def test_a_wrapped_flash_attention_3_with_another_interface_is_not_called() -> None:
    library = flash_attention_3()
    assert flash._fits(library)

    def other(dout: Tensor, q: Tensor, causal: bool) -> Tensor:
        return dout.clone()

    library._flash_attn_backward = torch.library.custom_op("memorywalker_test::other", other, mutates_args=())
    assert not flash._fits(library)


def test_more_query_blocks_than_a_grid_has() -> None:
    plan = plan_tree(np.full(65_536, -1, dtype=np.int32))
    with pytest.raises(LayoutError, match=r"65,536 query blocks in a micro-batch, FlashAttention takes 65,535; lower"):
        flash._on_device(plan, torch.device("cpu"))


def test_more_keys_than_32_bits_count() -> None:
    blocks = tuple(QueryBlock(2**30 + i, 2**30 + i + 1, ((0, 2**30),)) for i in range(2))
    plan = TreePlan(2**30 + 2, np.empty(0, dtype=np.int32), blocks, (2**30, 2**30 + 2))
    with pytest.raises(LayoutError, match=r"paths of 2 query blocks have 2,147,483,650 keys, more than 32 bits count"):
        plan.key_bounds  # noqa: B018  # computed when it is asked for


# The reference itself


@dataclass
class Call:
    """A call of both kernels, right until something is changed."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None
    softmax_scale: Any = 0.125
    device: str = "cpu"
    forward: dict[str, Any] | None = None
    backward: Callable[[dict[str, Any]], None] = lambda given: None
    """Changes what backward gets."""

    @classmethod
    def right(cls) -> Call:
        query, key, value, grad_out = Row(np.full(6, -1)).tensors((0, 6))
        return cls(query.detach(), key.detach(), value.detach(), grad_out, [0, 2, 6], [0, 2, 6])

    def run(self, version: int) -> tuple[Tensor, list[Tensor]]:
        library = (flash_attention_2 if version == 2 else flash_attention_3)(self.device)
        first, second, common, causal = (
            (library._flash_attn_varlen_forward, library._flash_attn_varlen_backward, {"dropout_p": 0.0}, "causal")
            if version == 2
            else (library._flash_attn_forward, library._flash_attn_backward, {}, "is_causal")
        )
        bounds = {}
        for name, longest in (("cu_seqlens_q", self.max_seqlen_q), ("cu_seqlens_k", self.max_seqlen_k)):
            given = getattr(self, name)
            bounds[name] = torch.tensor(given, dtype=torch.int32) if isinstance(given, list) else given
            bounds[f"max_{name[3:]}".replace("seqlens", "seqlen")] = (
                int(np.diff(given).max()) if longest is None else longest
            )
        inputs = {"q": self.q, "k": self.k, "v": self.v}
        settings = {**bounds, "softmax_scale": self.softmax_scale, **common}
        out, lse, *_ = first(**inputs, **settings, **{"causal": True} | (self.forward or {}))
        gradients = {f"d{name}": torch.empty_like(x) for name, x in inputs.items()}
        further = {} if version == 3 else {"window_size_left": -1, "window_size_right": -1, "alibi_slopes": None}
        given = {
            "dout": self.dout,
            "out": out,
            "softmax_lse": lse,
            causal: True,
            "softcap": 0.0,
            "deterministic": False,
        }
        given |= inputs | settings | gradients | further
        self.backward(given)
        second(**given)
        return out, [gradients[name] for name in ("dq", "dk", "dv")]


def shifted(x: Tensor) -> Tensor:
    """The same, from an address that is no multiple of 16."""
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


def last_strided(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape, 2)[..., 0]


def in_place(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any]], None]:
    def changed(given: dict[str, Any]) -> None:
        given[name] = change(given[name])

    return changed


def on_meta(call: Call, tokens: int, sequences: int) -> dict[str, Any]:
    """A call too large to compute."""
    q, k, v = (x.new_empty(tokens, *x.shape[1:], device="meta") for x in (call.q, call.k, call.v))
    bounds = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
    sizes = {"max_seqlen_q": tokens, "max_seqlen_k": tokens}
    return {
        "q": q,
        "k": k,
        "v": v,
        "dout": q,
        "cu_seqlens_q": bounds,
        "cu_seqlens_k": bounds,
        "device": "meta",
        **sizes,
    }


REFUSED: dict[str, tuple[Callable[[Call], dict[str, Any]], str]] = {
    "float32": (lambda c: {"q": c.q.float()}, "only support fp16 and bf16"),
    "float64": (lambda c: {"q": c.q.double(), "k": c.k.double(), "v": c.v.double()}, "only support fp16 and bf16"),
    "key dtype": (lambda c: {"k": c.k.half()}, "query and key must have the same dtype"),
    "value dtype": (lambda c: {"v": c.v.half()}, "query and value must have the same dtype"),
    "host": (lambda c: {"device": "meta"}, "q must be on meta"),
    "a batch": (lambda c: {"q": c.q[None]}, "q must have 3 dimensions"),
    "heads": (lambda c: {"q": torch.cat((c.q, c.q[:, :1]), 1)}, "must divide number of heads in query"),
    "value heads": (lambda c: {"v": c.v[:, :1]}, "k and v must have shape"),
    "size 60": (lambda c: {x: getattr(c, x)[..., :60].contiguous() for x in "qkv"}, "aligned|multiple of 8"),
    "size 264": (lambda c: {x: getattr(c, x).repeat(1, 1, 5)[..., :264].contiguous() for x in "qkv"}, "at most 256"),
    "address": (lambda c: {"k": shifted(c.k)}, "k is not aligned to 16 bytes"),
    "int64": (lambda c: {"cu_seqlens_q": torch.tensor([0, 2, 6]), "max_seqlen_q": 4}, "q must have dtype int32"),
    "bounds elsewhere": (
        lambda c: {"cu_seqlens_k": torch.empty(3, dtype=torch.int32, device="meta"), "max_seqlen_k": 4},
        "cu_seqlens_k must be on cpu",
    ),
    "strided bounds": (
        lambda c: {"cu_seqlens_q": torch.arange(0, 14, dtype=torch.int32)[::6], "max_seqlen_q": 6},
        "cu_seqlens_q must be contiguous",
    ),
    "no bounds": (lambda c: {"cu_seqlens_q": None, "max_seqlen_q": 4}, "must be provided"),
    "batch": (lambda c: {"cu_seqlens_k": [0, 2, 4, 6]}, r"cu_seqlens_k must have shape \(batch_size \+ 1\)"),
    "begin": (lambda c: {"cu_seqlens_q": [1, 2, 6]}, "cu_seqlens_q goes from 1 to 6, not 0 to 6"),
    "end": (lambda c: {"cu_seqlens_k": [0, 2, 5]}, "cu_seqlens_k goes from 0 to 5, not 0 to 6"),
    "order": (lambda c: {"cu_seqlens_q": [0, 7, 6], "max_seqlen_q": 7}, "cu_seqlens_q decreases"),
    "longest": (lambda c: {"max_seqlen_k": 3}, "cu_seqlens_k has a sequence of 4, over 3"),
    "longest as a tensor": (lambda c: {"max_seqlen_q": np.int32(4)}, "cu_seqlens_q and its longest sequence, an int"),
    "fewer keys": (lambda c: {"cu_seqlens_k": [0, 1, 6], "max_seqlen_k": 5}, "2 queries and 1 keys"),
    "no causality": (lambda c: {"forward": {"causal": False}}, "tree attention is causal"),
    "a window": (lambda c: {"forward": {"window_size_left": 8}}, "has no use"),
    "scale": (lambda c: {"softmax_scale": None}, "softmax_scale must be a float"),
    "sequences": (lambda c: on_meta(c, 65_536, 65_536), "invalid configuration argument"),
    "tokens": (lambda c: on_meta(c, 2**31, 1), "does not fit into 32 bits"),
    "gradient dtype": (lambda c: {"dout": c.dout.float()}, "dout must have the same dtype as q"),
    "gradient shape": (lambda c: {"dout": c.dout[:5]}, "dout must have shape"),
    "output": (lambda c: {"backward": in_place("out", torch.Tensor.float)}, "out must have the same dtype"),
    "place for dq": (lambda c: {"backward": in_place("dq", last_strided)}, "contiguous last dimension"),
    "place for dk": (lambda c: {"backward": in_place("dk", torch.Tensor.float)}, "dk must have the same dtype"),
    "lse by sequence": (
        lambda c: {"backward": in_place("softmax_lse", lambda x: x.new_empty(2, 4, 4))},
        r"softmax_lse is \(2, 4, 4\), read as \(heads, queries\)",
    ),
    "lse dtype": (lambda c: {"backward": in_place("softmax_lse", torch.Tensor.bfloat16)}, "contiguous float32"),
    "lse strided": (
        lambda c: {"backward": in_place("softmax_lse", lambda x: x.T.contiguous().T)},
        "contiguous float32",
    ),
    "another lse": (lambda c: {"backward": in_place("softmax_lse", lambda x: x + 0.01)}, "not that of the forward"),
}


@BOTH
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_kernel_would_refuse_or_misread(name: str, version: int) -> None:
    change, message = REFUSED[name]
    call = Call.right()
    call.run(version)
    vars(call).update(change(call))
    with pytest.raises((RuntimeError, NotImplementedError), match=message):
        call.run(version)


@BOTH
def test_empty_sequences_are_left_out(version: int) -> None:
    right = Call.right()
    out, gradients = right.run(version)
    right.cu_seqlens_q = right.cu_seqlens_k = [0, 0, 2, 2, 6, 6]
    again, same = right.run(version)
    assert torch.equal(out, again)
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))


def test_version_3_sums_the_gradients_of_a_group_before_it_rounds() -> None:
    query, key, value, grad_out = Row(packed(64), heads=16, groups=1).tensors((0, 64))
    call = Call(query.detach(), key.detach(), value.detach(), grad_out, [0, 64], [0, 64])
    right = oracles.attention_gradients(query, key, value, torch.ones(64, 64).tril().bool(), grad_out)[3]
    error = {version: oracles.relative(call.run(version)[1][2], right) for version in (2, 3)}
    assert error[3] < error[2] < LIMIT.attention_gradient


def test_the_log_sum_exp_is_float32_by_head_and_query() -> None:
    call = Call.right()
    found: SimpleNamespace = flash_attention_3()
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    bounded = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 4, "max_seqlen_k": 4}
    _, lse, *_ = found._flash_attn_forward(call.q, call.k, call.v, **bounded, softmax_scale=0.125, causal=True)
    scores = call.q[3, 1].double() @ call.k[2:4, 0].double().T * 0.125  # query 1 of the second sequence
    assert (lse.shape, lse.dtype) == ((4, 6), torch.float32)
    assert float(lse[1, 3]) == pytest.approx(float(scores.logsumexp(0)), abs=1e-5)
