"""Log-probabilities, entropy and forward KL when the logits are split over a tensor-parallel group.

All three follow one scheme. Forward walks over the rows in chunks, reduces each chunk to a few numbers per row, gathers
those numbers from all ranks in **one** collective, and combines them. Backward needs no collective: every rank knows
the combined numbers and writes the gradient of its own columns. (An all-reduce whose backward is an all-reduce, such as
torch's, would give the right value and a gradient that is tp times too large.)

Statistics are float32, float64 for float64 logits, whatever the dtype of the logits.
Legend: M rows, V vocabulary, h hidden size, tp ranks, D rows of the KL, k of its top-k form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_plugin.errors import ConfigError

CHUNK = 256
"""Rows at a time: a chunk of a 152k vocabulary is 150 MB in float32 on one rank."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Which token ids the columns of this rank's logits stand for."""

    group: dist.ProcessGroup
    start: int
    size: int
    """Columns of the real vocabulary; columns beyond it are padding and take no part in any softmax."""

    @classmethod
    def of(cls, vocabulary: int, columns: int, group: dist.ProcessGroup) -> Shard:
        """The shard of this rank, if every rank has ``columns`` of them."""
        start = group.rank() * columns
        size = min(columns, vocabulary - start)
        if size < 1 or columns * group.size() < vocabulary:
            raise ConfigError(
                f"a vocabulary of {vocabulary} does not fill {group.size()} shards of {columns}; "
                "use less tensor parallelism or less padding"
            )
        return cls(group, start, size)


def token_statistics(logits: Tensor, targets: Tensor, shard: Shard, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """[M] log-probability of each target and [M] entropy, from logits [M, V/tp]. Both have gradients."""
    result: tuple[Tensor, Tensor] = _TokenStatistics.apply(  # type: ignore[no-untyped-call]  # torch's
        logits, targets, shard, chunk
    )
    return result


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, shard: Shard, chunk: int) -> tuple[Tensor, Tensor]:
        numbers = logits.new_empty((len(logits), 4), dtype=statistics_dtype(logits))
        for rows, z in _chunks(logits, shard, chunk):
            column, inside = _column(targets[rows], shard)
            target = z.gather(1, column[:, None]).masked_fill_(~inside[:, None], 0.0)
            numbers[rows] = torch.cat((_moments(z), target), dim=-1)
        everywhere = _gather(numbers, shard.group)  # [tp, M, 4]
        log_sum, entropy, _ = _log_sum_and_entropy(everywhere[..., :3])
        logprob = everywhere[..., 3].sum(0) - log_sum
        ctx.save_for_backward(logits, targets, log_sum, entropy)
        ctx.shard, ctx.chunk = shard, chunk
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprob: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, log_sum, entropy = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        for rows, z in _chunks(logits, ctx.shard, ctx.chunk):
            logp = z - log_sum[rows, None]
            # d logprob / dz_j = [j = target] - p_j;  d entropy / dz_j = -p_j (log p_j + entropy)
            slope = grad_logprob[rows, None] + grad_entropy[rows, None] * (logp + entropy[rows, None])
            here = logp.exp_().mul_(slope).neg_()
            column, inside = _column(targets[rows], ctx.shard)
            here.scatter_add_(1, column[:, None], (grad_logprob[rows] * inside)[:, None])
            grad[rows, : ctx.shard.size] = here.to(grad.dtype)
        return grad, None, None, None


@dataclass(frozen=True, slots=True)
class Divergence:
    """Per row of the KL: how far the student is from the teacher, and how sure each of them is."""

    kl: Tensor
    """[D] KL(teacher || student), with the gradient of the student."""
    student_entropy: Tensor
    teacher_entropy: Tensor


def forward_kl(
    student: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    shard: Shard,
    *,
    top_k: int | None = None,
    chunk: int = CHUNK,
) -> Divergence:
    """KL(teacher || student) over the vocabulary, for student logits [D, V/tp] that carry gradient.

    The teacher is given by its last hidden states [D, h] and the output weight [V/tp, h]: [D, h] is all that has to be
    kept of its pass, and its logits exist one chunk at a time. With ``top_k`` both distributions are coarsened to the
    teacher's k most likely tokens and one bucket for the rest, which never increases a KL.
    """
    teacher_hidden, teacher_weight = teacher_hidden.detach(), teacher_weight.detach()
    kernel = _ForwardKl if top_k is None else _TopKForwardKl
    extra = () if top_k is None else (top_k,)
    kl, student_entropy, teacher_entropy = kernel.apply(  # type: ignore[no-untyped-call]  # torch's
        student, teacher_hidden, teacher_weight, shard, chunk, *extra
    )
    return Divergence(kl, student_entropy.detach(), teacher_entropy.detach())


class _ForwardKl(torch.autograd.Function):
    """KL = E_t[z_t - z_s] - logsumexp(z_t) + logsumexp(z_s);  dKL / dz_s = p_s - p_t."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, hidden: Tensor, weight: Tensor, shard: Shard, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        numbers = student.new_empty((len(student), 7), dtype=statistics_dtype(student))
        for rows, z_s in _chunks(student, shard, chunk):
            z_t = _teacher_logits(hidden[rows], weight, shard, z_s.dtype)
            numbers[rows] = torch.cat((_moments(z_s), _moments(z_t), _mean_gap(z_t, z_s)), dim=-1)
        everywhere = _gather(numbers, shard.group)  # [tp, D, 7]
        log_sum_s, entropy_s, _ = _log_sum_and_entropy(everywhere[..., :3])
        log_sum_t, entropy_t, share_t = _log_sum_and_entropy(everywhere[..., 3:6])
        kl = (everywhere[..., 6] * share_t).sum(0) - log_sum_t + log_sum_s
        ctx.save_for_backward(student, hidden, weight, log_sum_s, log_sum_t)
        ctx.shard, ctx.chunk = shard, chunk
        ctx.mark_non_differentiable(entropy_s, entropy_t)
        return kl, entropy_s, entropy_t

    @staticmethod
    def backward(ctx: Any, grad_kl: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        student, hidden, weight, log_sum_s, log_sum_t = ctx.saved_tensors
        grad = torch.zeros_like(student)
        for rows, z_s in _chunks(student, ctx.shard, ctx.chunk):
            z_t = _teacher_logits(hidden[rows], weight, ctx.shard, z_s.dtype)
            here = (z_s - log_sum_s[rows, None]).exp_() - (z_t - log_sum_t[rows, None]).exp_()
            grad[rows, : ctx.shard.size] = (here * grad_kl[rows, None]).to(grad.dtype)
        return grad, None, None, None, None


class _TopKForwardKl(torch.autograd.Function):
    """With p the top-k probabilities and r the rest: KL = sum p_t log(p_t / p_s) + r_t log(r_t / r_s).

    dKL / dz_s = p_s - q, where q is p_t on the top-k tokens and r_t spread over the others as the student spreads r_s.
    """

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, hidden: Tensor, weight: Tensor, shard: Shard, chunk: int, top_k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Every rank offers its own best k; columns it does not have count as impossible.
        numbers = student.new_full((len(student), 6 + 2 * top_k), float("-inf"), dtype=statistics_dtype(student))
        offered = torch.zeros((len(student), top_k), dtype=torch.long, device=student.device)
        count = min(top_k, shard.size)
        for rows, z_s in _chunks(student, shard, chunk):
            z_t = _teacher_logits(hidden[rows], weight, shard, z_s.dtype)
            best = z_t.topk(count, dim=-1)
            offered[rows, :count] = best.indices
            numbers[rows, :6] = torch.cat((_moments(z_s), _moments(z_t)), dim=-1)
            numbers[rows, 6 : 6 + count] = best.values
            numbers[rows, 6 + top_k : 6 + top_k + count] = z_s.gather(1, best.indices)
        everywhere = _gather(numbers, shard.group)  # [tp, D, 6 + 2k]
        log_sum_s, entropy_s, _ = _log_sum_and_entropy(everywhere[..., :3])
        log_sum_t, entropy_t, _ = _log_sum_and_entropy(everywhere[..., 3:6])
        offers_t = everywhere[..., 6 : 6 + top_k].transpose(0, 1).flatten(1)  # [D, tp * k]
        offers_s = everywhere[..., 6 + top_k :].transpose(0, 1).flatten(1)
        chosen = offers_t.topk(top_k, dim=-1).indices
        logp_t = offers_t.gather(1, chosen) - log_sum_t[:, None]  # [D, k]
        logp_s = offers_s.gather(1, chosen) - log_sum_s[:, None]
        p_t = logp_t.exp()
        rest_t, rest_s = (_rest(logp) for logp in (logp_t, logp_s))
        head = torch.where(p_t > 0, p_t * (logp_t - logp_s), 0.0).sum(-1)
        kl = head + rest_t * (rest_t.log() - rest_s.log())
        mine = (chosen // top_k == shard.group.rank()) & (p_t > 0)  # [D, k] chosen from this rank's offer
        column = offered.gather(1, chosen % top_k)
        ctx.save_for_backward(student, log_sum_s, rest_t / rest_s, p_t, column, mine)
        ctx.shard, ctx.chunk = shard, chunk
        ctx.mark_non_differentiable(entropy_s, entropy_t)
        return kl, entropy_s, entropy_t

    @staticmethod
    def backward(ctx: Any, grad_kl: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        student, log_sum_s, ratio, p_t, column, mine = ctx.saved_tensors
        grad = torch.zeros_like(student)
        for rows, z_s in _chunks(student, ctx.shard, ctx.chunk):
            p_s = (z_s - log_sum_s[rows, None]).exp_()
            tail = p_s * ratio[rows, None]
            # Tokens that other ranks offered go to a spare last column.
            target = torch.cat((tail, tail.new_empty(len(tail), 1)), dim=1)
            target.scatter_(1, column[rows].masked_fill(~mine[rows], ctx.shard.size), p_t[rows])
            here = p_s - target[:, :-1]
            grad[rows, : ctx.shard.size] = (here * grad_kl[rows, None]).to(grad.dtype)
        return grad, None, None, None, None, None


def statistics_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _chunks(logits: Tensor, shard: Shard, chunk: int) -> Iterator[tuple[slice, Tensor]]:
    """Rows in chunks, without padding columns, in the dtype of the statistics."""
    for start in range(0, len(logits), chunk):
        rows = slice(start, min(start + chunk, len(logits)))
        yield rows, logits[rows, : shard.size].to(statistics_dtype(logits))


def _column(targets: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """The column of each target on this rank, 0 if it is another rank's, and whether it is this one's."""
    column = targets - shard.start
    inside = (column >= 0) & (column < shard.size)
    return column.masked_fill(~inside, 0), inside


def _gather(numbers: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[tp, ...] the numbers of all ranks."""
    if group.size() == 1:
        return numbers.unsqueeze(0)
    everywhere = numbers.new_empty((group.size(), *numbers.shape))
    dist.all_gather_into_tensor(everywhere.view(-1, *numbers.shape[1:]), numbers.contiguous(), group=group)
    return everywhere


def _moments(z: Tensor) -> Tensor:
    """[rows, 3] maximum, sum of exponentials above it, and the sum of z with those exponentials as weights."""
    peak = z.amax(dim=-1)
    weights = (z - peak[:, None]).exp_()
    return torch.stack((peak, weights.sum(-1), weights.mul_(z).sum(-1)), dim=-1)


def _mean_gap(z_t: Tensor, z_s: Tensor) -> Tensor:
    """[rows, 1] the sum of z_t - z_s with the teacher's exponentials as weights."""
    weights = (z_t - z_t.amax(dim=-1, keepdim=True)).exp_()
    return (weights * (z_t - z_s)).sum(-1, keepdim=True)


def _log_sum_and_entropy(moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From :func:`_moments` of all ranks: [rows] log-sum-exp, [rows] entropy, and [tp, rows] what a rank's sums of
    ``exp(z - its maximum)`` have to be multiplied with to become sums of probabilities."""
    peaks, sums, means = moments.unbind(-1)
    log_sum = torch.logsumexp(peaks + sums.log(), dim=0)
    share = (peaks - log_sum).exp()
    return log_sum, log_sum - (means * share).sum(0), share


def _teacher_logits(hidden: Tensor, weight: Tensor, shard: Shard, dtype: torch.dtype) -> Tensor:
    return torch.matmul(hidden, weight[: shard.size].t()).to(dtype)


def _rest(logp: Tensor) -> Tensor:
    """[rows] what the top-k leave over; at least what rounding leaves over, so that ratios of it stay meaningful."""
    return (1.0 - logp.exp().sum(-1)).clamp_min(8 * torch.finfo(logp.dtype).eps)
