"""Vocabulary-parallel statistics against plain softmax over the whole vocabulary; values and gradients."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slime_plugin.errors import ConfigError
from slime_plugin.train.ranks import OnProgress, run_ranks
from slime_plugin.train.vocabulary import Shard, forward_kl, token_statistics

ROWS, VOCABULARY, HIDDEN = 13, 29, 6
Numbers = dict[str, Tensor]


def inputs(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = {
        "student": (ROWS, HIDDEN),
        "teacher": (ROWS, HIDDEN),
        "weight": (VOCABULARY, HIDDEN),
        "upstream": (3, ROWS),
    }
    made = {name: torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for name, size in sizes.items()}
    return made | {"targets": torch.randint(VOCABULARY, (ROWS,), generator=generator)}


def plainly(top_k: int | None) -> Numbers:
    """The same numbers from whole distributions and autograd."""
    given = inputs()
    hidden, weight = given["student"].requires_grad_(), given["weight"].requires_grad_()
    student = torch.softmax(hidden @ weight.T, -1)
    teacher = torch.softmax(given["teacher"] @ given["weight"].detach().T, -1)
    entropy = -(student * student.log()).sum(-1)
    logprob = student.log()[torch.arange(ROWS), given["targets"]]
    p, q = teacher, student
    if top_k is not None and top_k < VOCABULARY:
        best = teacher.topk(top_k, -1).indices
        p, q = (torch.cat((x.gather(1, best), 1 - x.gather(1, best).sum(-1, keepdim=True)), -1) for x in (p, q))
    kl = (p * (p / q).log()).sum(-1)
    return _with_gradients(logprob, entropy, kl, hidden, weight) | {
        "student_entropy": entropy.detach(),
        "teacher_entropy": -(teacher * teacher.log()).sum(-1),
    }


def in_parallel(on_progress: OnProgress, top_k: int | None, chunk: int, padding: int, dtype: torch.dtype) -> Numbers:
    """On one rank: its rows of the weight, its columns of the logits. Hidden states' gradients are summed."""
    group = dist.group.WORLD
    assert group is not None
    columns = -(-VOCABULARY // group.size()) + padding
    shard = Shard.of(VOCABULARY, columns, group)
    given = inputs(dtype)
    whole = torch.cat((given["weight"], torch.full((columns * group.size() - VOCABULARY, HIDDEN), 9.0, dtype=dtype)))
    mine = whole[group.rank() * columns : (group.rank() + 1) * columns].clone().requires_grad_()
    hidden = given["student"].requires_grad_()
    logits = hidden @ mine.T
    logprob, entropy = token_statistics(logits, given["targets"], shard, chunk)
    divergence = forward_kl(logits, given["teacher"], mine, shard, top_k=top_k, chunk=chunk)
    found = _with_gradients(logprob, entropy, divergence.kl, hidden, mine)
    for key in [key for key in found if key.endswith("/hidden")]:
        dist.all_reduce(found[key])
    return found | {"student_entropy": divergence.student_entropy, "teacher_entropy": divergence.teacher_entropy}


def _with_gradients(logprob: Tensor, entropy: Tensor, kl: Tensor, hidden: Tensor, weight: Tensor) -> Numbers:
    found: Numbers = {}
    outputs = {"logprob": logprob, "entropy": entropy, "kl": kl}
    for (name, values), upstream in zip(outputs.items(), inputs()["upstream"], strict=True):
        grads = torch.autograd.grad(values, (hidden, weight), upstream.to(values.dtype), retain_graph=True)
        found |= {name: values.detach(), f"{name}/hidden": grads[0], f"{name}/weight": grads[1]}
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("top_k", "chunk", "padding"), [(None, 4, 0), (None, 100, 2), (5, 4, 1), (VOCABULARY, 5, 0)])
def test_statistics_are_those_of_the_whole_distribution(
    ranks: int, top_k: int | None, chunk: int, padding: int
) -> None:
    expected = plainly(top_k)
    everywhere = run_ranks(ranks, in_parallel, top_k, chunk, padding, torch.float64)
    for found in everywhere:
        for key in (key for key in expected if not key.endswith("/weight")):
            assert torch.allclose(found[key], expected[key], rtol=1e-9, atol=1e-12), key
    for key in ("logprob/weight", "entropy/weight", "kl/weight"):
        rows = torch.cat([found[key] for found in everywhere])
        assert torch.allclose(rows[:VOCABULARY], expected[key], rtol=1e-9, atol=1e-12), key
        assert not rows[VOCABULARY:].any(), "padding takes no part"


def test_half_precision_logits_have_float32_statistics() -> None:
    (found,) = run_ranks(1, in_parallel, None, 4, 0, torch.bfloat16)
    expected = plainly(None)
    assert found["logprob"].dtype == found["kl"].dtype == torch.float32
    for key in ("logprob", "entropy", "kl"):
        assert torch.allclose(found[key].double(), expected[key], atol=0.1), key


def test_coarser_distributions_never_differ_more() -> None:
    kls = [run_ranks(2, in_parallel, k, 4, 0, torch.float64)[0]["kl"] for k in (2, 5, 12, None)]
    for few, many in pairwise(kls):
        assert bool((few <= many + 1e-12).all())
        assert bool((few < many).any())


def test_shards_that_the_vocabulary_does_not_fill_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="a vocabulary of 29 does not fill 2 shards of 29; use less tensor parallelism"
    ):
        run_ranks(2, _shard, 29, 29)
    with pytest.raises(ConfigError, match="a vocabulary of 29 does not fill 2 shards of 14"):
        run_ranks(2, _shard, 29, 14)


def _shard(on_progress: OnProgress, vocabulary: int, columns: int) -> int:
    group = dist.group.WORLD
    assert group is not None
    return Shard.of(vocabulary, columns, group).size
