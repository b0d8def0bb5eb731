"""A faster policy for language models. grpo.py takes it if this file is there and the model allows.

Its numbers are those of the plain policy. It is faster because the head makes the logits of some
tokens at a time (tiles), because texts of similar length are padded together (blocks), and because
the prompt of a group goes through the model once, not once a completion (share).

Shapes: N samples, T completion tokens (padded), n sampled tokens, H hidden units, V tokens in the
vocabulary, v tokens of a tile, P prompt tokens, R texts of a block, L tokens of a text (padded).
"""

import copy
import ctypes
from unittest import mock

import numpy as np
import torch
from torch import nn
from transformers import masking_utils

SMALL = 10e6  # parameters; below, the work around the model costs more than is saved
BLOCK = dict(cpu=1024, cuda=8192)  # tokens; a GPU needs many to be busy
TILE = dict(cpu=2**22, cuda=2**28)  # logits; on a CPU they should fit in the cache
KEPT = dict(cpu=2**26, cuda=2**30)  # logits that forward keeps, so that backward need not make them


class HeadLogps(torch.autograd.Function):
    """hidden [n, H], weight [V, H], targets [n], temperature -> logps [n], entropy [n].

    With the logits z, their probabilities p, and log Z = log sum exp z over the vocabulary:
    log p(target) = z(target) - log Z, and the entropy is log Z - sum p z. Forward needs one tile of
    z at a time; backward overwrites it with its gradient, 1 - p at the target and -p elsewhere."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature: float):
        device = hidden.device.type
        # Backward runs outside of autocast, so the dtype of its products, too, is decided here.
        if torch.is_autocast_enabled(device):
            hidden = hidden.to(torch.get_autocast_dtype(device))
        ctx.temperature = temperature
        ctx.kept = {}  # first token of a tile -> its logits
        log_zs = []
        means = []
        of_targets = 0
        with torch.autocast(device, enabled=False):
            for tokens, z in tiles(ctx, hidden, weight):
                log_zs.append(z.logsumexp(-1))  # [n]
                means.append((z.softmax(-1) * z).sum(-1))  # [n]
                column, inside = columns_of(targets, tokens)  # [n, 1]
                of_targets += z.gather(-1, column).where(inside, 0)
                if tokens.stop * len(hidden) <= KEPT[device]:
                    ctx.kept[tokens.start] = z
        log_zs = torch.stack(log_zs)  # [tiles, n]
        log_z = log_zs.logsumexp(0)  # [n]
        p = log_zs.softmax(0)  # [tiles, n], the probability that the token is in the tile
        entropy = log_z - (p * torch.stack(means)).sum(0)  # [n]
        ctx.save_for_backward(hidden, weight, targets, log_z)
        ctx.mark_non_differentiable(entropy)
        return of_targets[:, 0] - log_z, entropy

    @staticmethod
    def backward(ctx, grad_logps, _):
        hidden, weight, targets, log_z = ctx.saved_tensors
        grad = grad_logps[:, None] / ctx.temperature  # [n, 1]
        grad_hidden = torch.zeros_like(hidden, dtype=log_z.dtype)  # [n, H]
        grad_weight = None
        if ctx.needs_input_grad[1]:  # not with adapters
            grad_weight = torch.zeros_like(weight)  # [V, H]
        for tokens, z in tiles(ctx, hidden, weight):
            grad_z = z.sub_(log_z[:, None]).exp_().mul_(-grad)  # in the memory of z
            column, inside = columns_of(targets, tokens)  # [n, 1]
            grad_z.scatter_add_(-1, column, grad.where(inside, 0))
            grad_z = grad_z.to(hidden.dtype)
            grad_hidden += grad_z @ weight[tokens].to(hidden.dtype)
            if grad_weight is not None:
                grad_weight[tokens] = grad_z.T @ hidden
        return grad_hidden, grad_weight, None, None


def tiles(ctx, hidden, weight):
    """The tokens of each tile, and their logits [n, v], at least in float32."""
    width = 1 + TILE[hidden.device.type] // (1 + len(hidden))
    wide = torch.promote_types(hidden.dtype, torch.float32)
    for start in range(0, len(weight), width):
        tokens = slice(start, start + width)
        z = ctx.kept.pop(start, None)
        if z is None:
            tile_weight = weight[tokens].to(hidden.dtype)  # [v, H]
            z = (hidden @ tile_weight.T).to(wide) / ctx.temperature
        yield tokens, z


def columns_of(targets, tokens: slice):
    """The column of each target in the tile, and whether the tile has it: [n, 1] each."""
    column = targets[:, None] - tokens.start
    inside = (column >= 0) & (column < tokens.stop - tokens.start)
    return column.where(inside, 0), inside


class FastPolicy(nn.Module):
    """policy(collate(samples, device, policy.layout)) -> (logps [N, T], entropy [N, T]), like the
    plain policy, but 0 where no token was sampled. share: the keys and values of a prompt are
    computed once, and are the cache of its completions."""

    def __init__(self, plain, share: bool):
        super().__init__()
        self.model = plain.model
        self.temperature = plain.temperature
        self.by_length = plain.micro_batches
        self.share = share

    def micro_batches(self, samples: list, budget: float) -> list[list]:
        """Samples of at most `budget` tokens, the longest first. With share a prompt counts once,
        and groups that fit stay whole."""
        if not self.share:
            return self.by_length(samples, budget)
        groups = {}
        for s in sorted(samples, key=lambda s: -s.total_length):
            groups.setdefault(prompt_of(s), []).append(s)
        batches = [[]]
        for group in groups.values():
            if token_count(batches[-1] + group) > budget:
                batches.append([])
            for s in group:
                if token_count(batches[-1] + [s]) > budget:
                    batches.append([])
                batches[-1].append(s)
        return [batch for batch in batches if batch]

    def layout(self, samples: list) -> dict:
        """blocks: [R, L] each, texts of similar length; hidden_states has a row for each of their
        places. With share a text is a completion; prompts [g, P] stand beside, and owners [R] says
        which prompt a text has. targets [n]: the sampled tokens; read [n]: the rows that predict
        them; place [n]: where they stand in the flattened [N, T]."""
        completion = padded([s.completion_ids for s in samples])  # [N, T]
        sampled = padded([s.sampled for s in samples])  # [N, T]
        prompts = {prompt_of(s): s.prompt.ids for s in samples}
        numbers = {prompt: number for number, prompt in enumerate(prompts)}
        first = torch.zeros(len(samples), dtype=torch.int64)  # [N], where token 0 is predicted
        texts = [s.completion_ids for s in samples]
        if not self.share:
            texts = [np.append(s.prompt.ids, s.completion_ids) for s in samples]
            first += torch.tensor([len(s.prompt.ids) - 1 for s in samples])

        device = self.model.device
        blocks = []
        owners = []
        start = 0
        order = sorted(range(len(samples)), key=lambda row: -len(texts[row]))
        while order:
            L = len(texts[order[0]])
            R = max(1, BLOCK[device.type] // L)
            rows, order = order[:R], order[R:]
            owner = [numbers[prompt_of(samples[row])] for row in rows]
            owners.append(torch.tensor(owner).to(device, non_blocking=True))
            blocks.append(padded([texts[row] for row in rows]).to(device, non_blocking=True))
            first[rows] += start + L * torch.arange(len(rows))
            start += L * len(rows)
        predictors = first[:, None] + torch.arange(completion.shape[1])  # [N, T]
        mask = padded([np.ones_like(ids) for ids in prompts.values()], side="left")  # [g, P]
        return dict(
            blocks=blocks,
            owners=owners,
            prompts=padded(list(prompts.values()), side="left"),
            prompt_mask=None if mask.all() else mask,
            prompt_places=(mask.cumsum(1) - 1).clamp(min=0),
            read=predictors[sampled],
            place=sampled.flatten().nonzero()[:, 0],
            targets=completion[sampled],
        )

    def forward(self, batch: dict):
        if self.model.is_gradient_checkpointing:  # it acts in training mode only
            self.model.train(torch.is_grad_enabled())
        hidden = self.hidden_states(batch).index_select(0, batch["read"])  # [n, H]
        weight = self.model.get_output_embeddings().weight  # [V, H]
        logps, entropy = HeadLogps.apply(hidden, weight, batch["targets"], self.temperature)
        zeros = logps.new_zeros(batch["sampled"].numel())  # [N * T]
        logps = zeros.scatter(0, batch["place"], logps).view_as(batch["sampled"])
        entropy = zeros.scatter(0, batch["place"], entropy).view_as(batch["sampled"])
        return logps, entropy

    def hidden_states(self, batch: dict):
        """[places, H]. With share, the end of the prompt predicts the first token of each row."""
        body = self.model.base_model
        states = []
        if self.share:
            mask = batch["prompt_mask"]  # [g, P]; None: all prompts are equally long
            places = batch["prompt_places"]  # [g, P]
            # transformers would ask whether the mask is all True, and so wait for the GPU.
            with mock.patch.object(masking_utils, "fast_all", return_value=False):
                options = dict(attention_mask=mask, position_ids=places, use_cache=True)
                prompts = body(batch["prompts"], **options)
            ends = prompts.last_hidden_state[:, -1:]  # [g, 1, H]
        for ids, owner in zip(batch["blocks"], batch["owners"], strict=True):  # [R, L], [R]
            options = dict(use_cache=self.share)
            if self.share:
                after = torch.arange(1, ids.shape[1] + 1, device=ids.device)  # [L]
                options["position_ids"] = places[owner, -1:] + after  # [R, L]
                options["past_key_values"] = rows_of(prompts.past_key_values, owner)
                if mask is not None:
                    mask_of_rows = torch.cat([mask[owner], torch.ones_like(ids)], 1)  # [R, P + L]
                    options["attention_mask"] = mask_of_rows
            out = body(ids, **options).last_hidden_state  # [R, L, H]
            if self.share:
                out = torch.cat([ends[owner], out[:, :-1]], dim=1)  # [R, L, H]
            states.append(out.flatten(0, 1))
        return torch.cat(states)


def rows_of(cache, owner):
    """A cache that holds the texts number owner [R] of this one."""
    cache = copy.copy(cache)
    cache.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in cache.layers:  # a layer without keys and values is an error
        layer.keys = layer.keys.index_select(0, owner)  # [R, heads, P, units of a head]
        layer.values = layer.values.index_select(0, owner)
    return cache


def prompt_of(sample) -> bytes:
    """What texts with the same prompt share; not the group, which a replay may number anew."""
    return sample.prompt.ids.tobytes()


def token_count(samples: list) -> int:
    """Their completions and prompts, where a prompt counts once."""
    prompts = {prompt_of(s): len(s.prompt.ids) for s in samples}
    completions = [len(s.completion_ids) for s in samples]
    return sum(prompts.values()) + sum(completions)


def padded(arrays: list[np.ndarray], side: str = "right") -> torch.Tensor:
    tensors = [torch.from_numpy(array) for array in arrays]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_side=side)


def choose(plain, samples: list, collate, cfg) -> tuple:
    """The fastest policy that gives these samples the log-probabilities of the plain one, and what
    to say of the choice. Raises torch.OutOfMemoryError."""
    keep_freed_memory(plain.model.device)
    if plain.model.num_parameters() < SMALL:
        return plain, ""
    P = np.mean([len(s.prompt.ids) for s in samples])
    saved = P - P / cfg.num_generations  # prompt tokens a completion
    # Completions are often much shorter than their limit. Gradient checkpointing takes no cache.
    shares = [True, False]
    if saved < cfg.max_completion_length / 4 or cfg.gradient_checkpointing:
        shares = [False]
    for share in shares:
        policy = FastPolicy(plain, share)
        try:
            compare(policy, plain, samples, collate)
            return policy, f"share={share}"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a model raises that takes no cache
            why = f"{error!r:.99}"
    return plain, why


@torch.no_grad()
def compare(policy, plain, samples: list, collate) -> None:
    """Raises ValueError if in float32 the two differ by more than rounding."""
    if plain.model.get_output_embeddings().bias is not None:
        raise ValueError("the head has a bias")
    device = plain.model.device
    batch = collate(samples, device, policy.layout)
    with torch.autocast(device.type, enabled=False):
        logps, _ = policy(batch)  # [N, T]
        expected, _ = plain(collate(samples, device, plain.layout))  # [N, T]
    off = (logps - expected)[batch["sampled"]].abs().max().item()
    if not off <= 1e-3:  # or it is nan
        raise ValueError(f"log-probabilities are {off:.1g} off")


def keep_freed_memory(device: torch.device) -> None:
    """glibc would return the memory of large tensors to the kernel, which clears it before it gives
    it out again: 10 % of an update of 135 M parameters, and more of a smaller model's."""
    libc = ctypes.CDLL(None)
    if device.type == "cpu" and hasattr(libc, "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no mapping of its own for a large tensor
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: keep what is freed
