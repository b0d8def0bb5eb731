"""How much work does the host do in a step, on 1 to 64 ranks?   python studies/host.py [--quick]

CPU seconds of one rank, on one thread, while no model runs: grpo.py's own functions, in the order
of its step, on made-up samples. One process takes the place of rank r of W. When a collective
returns, its receive buffer holds what the other ranks would send there, to the byte. Left out are
the transfer itself, sampling, the model, the loss, the notes of tokens and the optimiser. The table
has the slower one of the first and the last rank, and the median of three steps.
"""

import contextlib
import dataclasses
import io
import tempfile
import time
from collections import Counter

import numpy as np
import torch
import torch.distributed as dist
from common import arguments, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

import grpo
import harness.log
import harness.packing
import harness.sampler_gap
import harness.scorer
import harness.user_code
import harness.workers
from grpo import Completion, Config, Sample
from harness.ranks import World
from harness.rows import Prompt

G = 8  # samples of a prompt
PROMPT, COMPLETION, LONGEST = 150, 2300, 8192  # tokens: on average, and of the longest completion
WORDS = 150_000  # of the tokenizer, as large ones have today
PARTS = ("score", "exchange", "plan", "collate", "log-probabilities", "gap", "metrics, log", "rest")
SETTINGS = {
    "tokens, one update a rollout": dict(num_minibatches=1),
    "tokens, four updates": dict(num_minibatches=4),
}
SIZES, RANKS = (1_000_000, 5_000_000, 20_000_000), (1, 2, 4, 8, 16, 32, 64)
CPU = torch.device("cpu")


class Meter:
    """CPU seconds by part. While one part runs inside another, only the inner one counts."""

    def __init__(self):
        self.seconds = Counter()
        self.stack = ["left out"]
        self.last = time.process_time()

    def mark(self) -> None:
        now = time.process_time()
        self.seconds[self.stack[-1]] += now - self.last
        self.last = now

    @contextlib.contextmanager
    def __call__(self, part: str):
        self.mark()
        self.stack.append(part)
        try:
            yield
        finally:
            self.mark()
            self.stack.pop()

    def wrap(self, part: str, function):
        def timed(*args, **options):
            with self(part):
                return function(*args, **options)

        return timed


@contextlib.contextmanager
def replaced(module, **attributes):
    saved = {name: getattr(module, name) for name in attributes}
    vars(module).update(attributes)
    try:
        yield
    finally:
        vars(module).update(saved)


# --------------------------------------------------------------------------------------------------
# Ranks that do not exist


class Sent(Exception):
    """Carries the items that a rank was about to send."""


@contextlib.contextmanager
def collectives(all_gather, rank: int, size: int):
    """torch.distributed as on rank `rank` of `size`, with this function in place of the network."""
    stand_ins = dict(
        all_gather=all_gather,
        get_world_size=lambda *_, **__: size,
        get_rank=lambda *_, **__: rank,
    )
    private = dict(
        _rank_not_in_group=lambda *_: False,
        _get_object_coll_device=lambda *_: CPU,
    )
    with replaced(dist, **stand_ins), replaced(dist.distributed_c10d, **stand_ins, **private):
        yield


class Rank(World):
    """Rank `rank` of `size`. In the gather of phase p the other ranks send peers[p][rank], tensor
    by tensor. If `peers` has no such phase, they send the same as this rank."""

    def __init__(self, rank: int, size: int, peers: dict, meter: Meter):
        super().__init__(rank, size, CPU)
        self.meter, self.peers = meter, peers
        self.phase = ""
        self.received = Counter()  # bytes by phase

    def gather(self, items):
        number = 0  # of the tensor: World.gather sends sizes first, then the items

        def all_gather(outputs, tensor, *_, **__):
            nonlocal number
            with self.meter("left out"):
                tensor = tensor.clone()  # it may be one of the outputs
                for rank, output in enumerate(outputs):
                    sent = tensor
                    if self.phase in self.peers:
                        sent = self.peers[self.phase][rank][number]
                    output[: len(sent)] = sent
                    if rank != self.rank:
                        self.received[self.phase] += output.nbytes
                number += 1

        part = self.phase if self.phase in PARTS else "rest"
        with self.meter(part), collectives(all_gather, self.rank, self.size):
            return super().gather(items)


def sent_by(rank: int, size: int, items: list) -> list:
    """The tensors that World.gather would send for these items; the last one holds the items."""
    sent = []

    def all_gather(outputs, tensor, *_, **__):
        sent.append(tensor.clone())
        if tensor.dtype == torch.uint8:
            raise Sent
        for output in outputs:
            output[:] = tensor

    with collectives(all_gather, rank, size), contextlib.suppress(Sent):
        World(rank, size, CPU).gather(items)
    return sent


class SendingWorld(World):
    """A rank whose gather() stops with the items that it would send."""

    def gather(self, items):
        raise Sent(items)


# --------------------------------------------------------------------------------------------------
# A rollout without a model


class NoPolicy(nn.Module):
    """All its log-probabilities are 0. Takes the optimiser's place, too."""

    packs, param_groups = True, [{}]

    def __init__(self, meter: Meter):
        super().__init__()
        self.meter = meter
        self.parameter = nn.Parameter(torch.zeros(1))

    def rows(self, samples):
        return harness.packing.packed_layout(samples)

    def forward(self, batch):
        with self.meter("left out"):
            logps = torch.zeros(batch["shape"])
            return logps, logps

    def step(self):
        pass

    def zero_grad(self, set_to_none=True):
        pass


def tokenizer_of(words: int):
    """A tokenizer as large as today's that needs no download. Its words have 1 to 7 letters."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyzĠ"))
    vocabulary = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(vocabulary) < words:
        spellings = rng.choice(letters, (words, 7))
        lengths = rng.integers(2, 8, words)
        for spelling, length in zip(spellings, lengths, strict=True):
            vocabulary["".join(spelling[:length])] = None
    ids = {word: i for i, word in enumerate(list(vocabulary)[:words])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def rollout(tokens: int, words: int) -> tuple[list, list]:
    """Prompts, and a group of G completions for each. Lengths are lognormal, and there are as many
    groups as make about this number of tokens."""
    rng = np.random.default_rng(0)
    count = max(1, round(tokens / G / (PROMPT + COMPLETION)))
    lengths = rng.lognormal(0, 0.6, (count, G))
    lengths = np.clip(lengths * COMPLETION / lengths.mean(), 1, LONGEST).astype(int)
    prompts, groups = [], []
    for number in range(count):
        ids = rng.integers(0, words, rng.integers(PROMPT // 2, 3 * PROMPT // 2)).astype(np.int32)
        text = f"question {number} " * 40
        row = dict(prompt=text, answer=str(number))
        prompts.append(Prompt(ids, text, row, [dict(role="user", content=text)]))
        group = []
        for n in lengths[number]:
            ids = rng.integers(0, words, n).astype(np.int32)
            logps = rng.normal(-1, 1e-5, n).astype(np.float32)
            group.append(Completion(ids, logps, "length" if n == LONGEST else "stop"))
        groups.append(group)
    return prompts, groups


# --------------------------------------------------------------------------------------------------
# One step


class Host:
    """The host's part of a step of grpo.train."""

    def __init__(self, tokens: int, tokenizer, folder: str):
        prompts, groups = rollout(tokens, len(tokenizer))
        self.cfg = Config(
            model="none",
            train_data="none",
            num_prompts=len(prompts),
            num_generations=G,
            max_sampler_gap=1e9,
            max_completion_length=LONGEST,
            micro_batch_tokens=16384,
            log_tokens=0,
            out_dir=folder,
        )
        self.samples = []
        self.decode_seconds = []  # CPU seconds of each group
        for number, group in enumerate(groups):
            started = time.process_time()
            texts = [grpo.decode(tokenizer, c.ids) for c in group]
            self.decode_seconds.append(time.process_time() - started)
            for c, text in zip(group, texts, strict=True):
                self.samples.append(
                    Sample(number, prompts[number], c.ids, c.logps, c.finish_reason, text)
                )
        self.tokens = sum(s.n_tokens for s in self.samples)
        self.tokenizer = tokenizer
        self.scorer = harness.scorer.Scorer(harness.user_code.load_rewards(self.cfg.reward))
        grpo.score(self.samples, self.scorer, 1, self.cfg)

    def peers(self, size: int) -> dict:
        """The tensors that the ranks send, by phase and rank."""
        if size == 1:
            return {}
        policy = NoPolicy(Meter())
        sent = {"exchange": [], "log-probabilities": []}
        micro_batches = grpo.plan(self.samples, policy.packs, self.cfg, size)
        for rank in range(size):
            share = [s for s in self.samples if s.group % size == rank]
            sent["exchange"].append(sent_by(rank, size, share))
            world = SendingWorld(rank, size, CPU)
            with replaced(grpo, plan=lambda *_: micro_batches):
                try:
                    grpo.compute_logps(policy, self.samples, "ref_logps", self.cfg, world)
                except Sent as stop:
                    sent["log-probabilities"].append(sent_by(rank, size, stop.args[0]))
        return sent

    def timed_functions(self, world: Rank, policy: NoPolicy) -> dict:
        """The functions of grpo with the meter around them; the loss does nothing."""
        meter, collate = world.meter, grpo.collate

        def no_loss(logps, batch, cfg, *_):
            mask, sampler_logps = batch["mask"], batch["sampler_logps"]
            with meter("left out"):
                stats = harness.sampler_gap.sampler_stats(logps, sampler_logps, mask, cfg)
                stats["tokens"] = mask.sum()
                return policy.parameter.sum() * 0, stats

        def timed_collate(samples, *rest):
            with meter("collate"):
                batch = collate(samples, *rest)
            if world.phase == "sums":  # the device does the rest of the update: give it one sample
                T = len(samples[0].completion_ids)
                batch["shape"] = (1, T)
                for name in batch:
                    if name in ("mask", "sampled", "advantages") or name.endswith("_logps"):
                        batch[name] = batch[name][:1, :T]
            return batch

        return dict(
            batch_loss=no_loss,
            collate=timed_collate,
            score=meter.wrap("score", grpo.score),
            plan=meter.wrap("plan", grpo.plan),
            sample_metrics=meter.wrap("metrics, log", grpo.sample_metrics),
            completion_rows=meter.wrap("metrics, log", grpo.completion_rows),
        )

    def step(self, rank: int, size: int, peers: dict, flags: dict) -> tuple[Counter, Counter]:
        """CPU seconds of a rank by part, and the bytes that it received by phase."""
        cfg, meter = dataclasses.replace(self.cfg, **flags), Meter()
        world, policy = Rank(rank, size, peers, meter), NoPolicy(meter)
        log = harness.log.Log(cfg, 0, 0.0, rank == 0)
        samples = [dataclasses.replace(s) for s in self.samples if s.group % size == rank]
        meter.seconds["decode"] = sum(self.decode_seconds[rank::size])
        sampler_metrics = meter.wrap("gap", harness.sampler_gap.sampler_metrics)
        with (
            replaced(grpo, **self.timed_functions(world, policy)),
            replaced(harness.sampler_gap, sampler_metrics=sampler_metrics),
            contextlib.redirect_stdout(io.StringIO()),
            meter("rest"),
        ):
            world.phase = "scores"
            scores = world.gather([grpo.score(samples, self.scorer, 1, cfg)])
            world.phase = "exchange"
            samples = sorted(world.gather(samples), key=lambda s: s.group)
            failures = self.scorer.failure_metrics(scores, 1, len(samples))
            no_signal = grpo.assign_advantages(samples, 1, cfg)
            kept = [s for s in samples if s.in_loss.any()]

            world.phase = "log-probabilities"
            if cfg.updates_per_step > 1:
                grpo.compute_logps(policy, kept, "old_logps", cfg, world)
            grpo.compute_logps(policy, kept, "ref_logps", cfg, world)

            world.phase = "sums"
            metrics = grpo.update(policy, policy, samples, cfg, world=world)
            metrics.update(frac_reward_zero_std=no_signal, **grpo.sample_metrics(samples))
            metrics.update(failures)
            rows = grpo.completion_rows(samples, 1, self.tokenizer)
            with meter("metrics, log"):
                log.step(dict(step=1, tokens_per_s=0.0) | metrics, rows)
        self.check(samples)
        return meter.seconds, world.received

    def check(self, samples: list) -> None:
        """Every rank must get all samples, with all their log-probabilities."""
        for received, original in zip(samples, self.samples, strict=True):
            assert received.text == original.text
            assert (received.completion_ids == original.completion_ids).all()
            assert (received.ref_logps == 0).all()


def total(step: tuple) -> float:
    return sum(step[0][part] for part in PARTS)


def slowest_rank(host: Host, size: int, peers: dict, flags: dict, repeats: int) -> tuple:
    """The median step of the first or the last rank, whichever takes longer."""
    medians = []
    for rank in {0, size - 1}:
        steps = [host.step(rank, size, peers, flags) for _ in range(repeats)]
        medians.append(sorted(steps, key=total)[repeats // 2])
    return max(medians, key=total)


def main() -> None:
    args = arguments(__doc__)
    args.jobs = 1
    sizes, ranks, repeats, words = SIZES, RANKS, 3, WORDS
    if args.quick:
        sizes, ranks, repeats, words = (20_000,), (1, 4), 1, 2000

    names = ["samples", "ranks", *PARTS, "all of these", "decode", "MB received"]
    tables = {name: [" | ".join([name, *names])] for name in SETTINGS}
    tokenizer = tokenizer_of(words)
    with tempfile.TemporaryDirectory() as folder:
        for tokens in sizes:
            host = Host(tokens, tokenizer, folder)
            for size in ranks:
                peers = host.peers(size)
                for name, flags in SETTINGS.items():
                    step = slowest_rank(host, size, peers, flags, repeats)
                    part_seconds, received = step
                    seconds = [part_seconds[part] for part in PARTS]
                    seconds += [total(step), part_seconds["decode"]]
                    row = [f"{host.tokens / 1e6:.2f} M", len(host.samples), size]
                    row += [f"{x:.2f}" for x in seconds]
                    row.append(f"{sum(received.values()) / 1e6:.0f}")
                    tables[name].append(row)
                    print(*row, flush=True)
    save(args, "host", None, *tables.values())


if __name__ == "__main__":
    main()
