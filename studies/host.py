"""What the host does in a step, while no model runs, on 1 to 64 ranks.   python studies/host.py [--quick]

CPU seconds of one rank, one thread: grpo.py's own functions in the order of its step, on made-up samples. One process
stands for rank r of W. The collectives are played: what the others send is what grpo.py would send there, to the byte,
and stands in the receive buffer when the collective returns. Left out: the wire itself, sampling, the model, the loss,
notes of tokens, the optimiser. Of the first and the last rank the slower one counts, of three steps the median.
"""

import contextlib
import dataclasses
import io
import tempfile
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from common import arguments, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

import grpo
import harness.log
import harness.run
import harness.workers
import reward
from grpo import Completion, Config, Sample
from harness.ranks import World
from harness.rows import Prompt

G, PROMPT, COMPLETION, LONGEST = (
    8,
    150,
    2300,
    8192,
)  # samples of a prompt; tokens, on average and at most
WORDS = 150_000  # of the tokenizer, as large ones have today
PARTS = ("score", "exchange", "plan", "collate", "log-probabilities", "gap", "metrics, log", "rest")
SETTINGS = {
    "tokens, one update a rollout": dict(num_minibatches=1),
    "tokens, four updates": dict(num_minibatches=4),
}
SIZES, RANKS = (1_000_000, 5_000_000, 20_000_000), (1, 2, 4, 8, 16, 32, 64)
CPU = torch.device("cpu")


class Meter:
    """CPU seconds by part. A part within another one counts for itself only."""

    def __init__(self):
        self.seconds, self.parts, self.last = Counter(), ["left out"], time.process_time()

    def mark(self) -> None:
        now = time.process_time()
        self.seconds[self.parts[-1]] += now - self.last
        self.last = now

    @contextlib.contextmanager
    def __call__(self, part: str):
        self.mark()
        self.parts.append(part)
        try:
            yield
        finally:
            self.mark()
            self.parts.pop()

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


# ----------------------------------------------------------------------------------------------------------------
# Ranks that are not there


class Sent(Exception):
    """What a rank was about to send."""


@contextlib.contextmanager
def collectives(all_gather, rank: int, size: int):
    """torch.distributed on rank `rank` of `size`, with this function in place of the wire."""
    stand_ins = dict(
        all_gather=all_gather, get_world_size=lambda *_, **__: size, get_rank=lambda *_, **__: rank
    )
    inner = dict(_rank_not_in_group=lambda *_: False, _get_object_coll_device=lambda *_: CPU)
    with replaced(dist, **stand_ins), replaced(dist.distributed_c10d, **stand_ins, **inner):
        yield


class Rank(World):
    """Rank r of W. In the gather called `phase` the others send peers[phase][rank], tensor by tensor; where that is
    not known, what this rank sends."""

    def __init__(self, rank: int, size: int, peers: dict, meter: Meter):
        super().__init__(rank, size, CPU)
        self.meter, self.peers, self.phase, self.received = meter, peers, "", Counter()

    def gather(self, items):
        number = 0

        def all_gather(outputs, tensor, *_, **__):
            nonlocal number
            with self.meter("left out"):
                own = tensor.clone()  # it may be one of the outputs
                for rank, output in enumerate(outputs):
                    sent = self.peers[self.phase][rank][number] if self.phase in self.peers else own
                    output[: len(sent)] = sent
                    self.received[self.phase] += output.nbytes if rank != self.rank else 0
                number += 1

        with (
            self.meter(self.phase if self.phase in PARTS else "rest"),
            collectives(all_gather, self.rank, self.size),
        ):
            return super().gather(items)


def sent_by(rank: int, size: int, items: list) -> list:
    """The tensors that World.gather hands to the wire for these items; the last one is the payload."""
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


class Asked(World):
    """A rank that is asked what it would gather."""

    def gather(self, items):
        raise Sent(items)


# ----------------------------------------------------------------------------------------------------------------
# A rollout without a model


class NoPolicy(nn.Module):
    """Log-probabilities of 0; stands in for the optimiser, too."""

    packs, moved, param_groups = True, False, [{}]

    def __init__(self, meter: Meter):
        super().__init__()
        self.meter, self.one = meter, nn.Parameter(torch.zeros(1))

    def forward(self, batch):
        with self.meter("left out"):
            logps = torch.zeros(batch["shape"])
            return logps, logps

    def no_sync(self):
        return contextlib.nullcontext()

    def step(self):
        pass

    def zero_grad(self, set_to_none=True):
        pass


def tokenizer_of(words: int):
    """Decodes words of 1 to 7 letters: none that is downloaded, and as large as today's."""
    rng, letters = np.random.default_rng(0), np.array(list("abcdefghijklmnopqrstuvwxyzĠ"))
    vocabulary = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(vocabulary) < words:
        drawn = rng.choice(letters, (words, 7))
        vocabulary |= dict.fromkeys(
            "".join(w[:n]) for w, n in zip(drawn, rng.integers(2, 8, words), strict=True)
        )
    tokenizer = Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(list(vocabulary)[:words])}, merges=[])
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def rollout(tokens: int, words: int) -> tuple[list, list]:
    """Prompts, and of each G completions of lognormal lengths: as many as make about this number of tokens."""
    rng, count = np.random.default_rng(0), max(1, round(tokens / G / (PROMPT + COMPLETION)))
    lengths = rng.lognormal(0, 0.6, (count, G))
    lengths = np.clip(lengths * COMPLETION / lengths.mean(), 1, LONGEST).astype(int)
    prompts, groups = [], []
    for number, row in enumerate(lengths):
        ids, text = (
            rng.integers(0, words, rng.integers(PROMPT // 2, 3 * PROMPT // 2)),
            f"question {number} " * 40,
        )
        messages = [dict(role="user", content=text)]
        prompts.append(
            Prompt(ids.astype(np.int32), text, dict(prompt=text, answer=str(number)), messages)
        )
        drawn = [
            (rng.integers(0, words, n).astype(np.int32), rng.normal(-1, 1e-5, n).astype(np.float32))
            for n in row
        ]
        groups.append([Completion(*c, "length" if len(c[0]) == LONGEST else "stop") for c in drawn])
    return prompts, groups


# ----------------------------------------------------------------------------------------------------------------
# One step


class Host:
    """The host's part of grpo.train's step."""

    def __init__(self, tokens: int, tokenizer, folder: str):
        prompts, groups = rollout(tokens, len(tokenizer))
        self.cfg = Config(
            model="none", train_data="none", num_prompts=len(prompts), num_generations=G, max_sampler_gap=1e9,
            max_completion_length=LONGEST, micro_batch_tokens=16384, log_tokens=0, out_dir=folder,
        )  # fmt: skip
        self.samples, self.decode = [], []  # CPU seconds of each group's decode
        for g, group in enumerate(groups):
            started = time.process_time()
            texts = [grpo.decode(tokenizer, c.ids) for c in group]
            self.decode.append(time.process_time() - started)
            for c, text in zip(group, texts, strict=True):
                self.samples.append(Sample(g, prompts[g], c.ids, c.logps, c.finish_reason, text))
        self.tokens, self.tokenizer = sum(s.n_tokens for s in self.samples), tokenizer
        self.scorer = harness.workers.Scorer(reward.load_rewards(self.cfg.reward))
        grpo.score(self.samples, self.scorer, 1, self.cfg)

    def peers(self, size: int) -> dict:
        """What the ranks send, by phase and rank."""
        policy, found = NoPolicy(Meter()), {"exchange": [], "log-probabilities": []}
        planned = grpo.plan(self.samples, policy.packs, self.cfg, World(0, size, CPU))
        for rank in range(size) if size > 1 else []:
            found["exchange"].append(
                sent_by(rank, size, [s for s in self.samples if s.group % size == rank])
            )
            with replaced(grpo, plan=lambda *_: planned):
                try:
                    grpo.compute_logps(
                        policy, self.samples, "ref_logps", self.cfg, Asked(rank, size, CPU)
                    )
                except Sent as sent:
                    found["log-probabilities"].append(sent_by(rank, size, sent.args[0]))
        return found if size > 1 else {}

    def step(self, rank: int, size: int, peers: dict, flags: dict) -> tuple[Counter, Counter]:
        """CPU seconds of a rank by part, and the bytes that it received by phase."""
        cfg, meter = dataclasses.replace(self.cfg, **flags), Meter()
        world, policy = Rank(rank, size, peers, meter), NoPolicy(meter)
        log = harness.log.Log(cfg, 0, 0.0, rank == 0)
        samples = [dataclasses.replace(s) for s in self.samples if s.group % size == rank]
        meter.seconds["decode"] = sum(self.decode[rank::size])

        def loss(logps, *_, **__):
            with meter("left out"):
                return policy.one.sum() * 0, dict(tokens=torch.tensor(logps.numel()))

        def collate(samples, *rest, collate=grpo.collate):
            with meter("collate"):
                batch = collate(samples, *rest)
            if world.phase != "sums":
                return batch
            T = len(
                samples[0].completion_ids
            )  # what follows is the device's work: it gets one sample
            cut = {k: x[:1, :T] for k, x in batch.items() if k == "mask" or k.endswith("_logps")}
            return batch | cut | dict(shape=(1, T))

        def timed(part, module, *names):
            return {name: meter.wrap(part, getattr(module, name)) for name in names}

        ours = (
            dict(collate=collate, grpo_loss=loss)
            | timed("score", grpo, "score")
            | timed("plan", grpo, "plan")
        )
        ours |= timed("metrics, log", grpo, "sample_metrics", "completion_rows")
        gaps = timed("gap", harness.log, "gap_metrics")
        with (
            replaced(grpo, **ours),
            replaced(harness.log, **gaps),
            contextlib.redirect_stdout(io.StringIO()),
            meter("rest"),
        ):
            world.phase = "scores"
            scores = world.gather([grpo.score(samples, self.scorer, 1, cfg)])
            world.phase = "exchange"
            samples = sorted(world.gather(samples), key=lambda s: s.group)
            failures = harness.run.Run.failures(
                SimpleNamespace(said=set()), scores, 1, len(samples)
            )
            no_signal = grpo.assign_advantages(samples, 1, cfg)
            counted = [s for s in samples if s.in_loss.any()] or samples
            world.phase = "log-probabilities"
            for name in ["ref_logps"] if cfg.updates_per_step == 1 else ["old_logps", "ref_logps"]:
                grpo.compute_logps(policy, counted, name, cfg, world)
            world.phase = "sums"
            metrics = grpo.update(policy, policy, samples, cfg, world=world)
            metrics |= (
                dict(frac_reward_zero_std=no_signal) | grpo.sample_metrics(samples, cfg) | failures
            )
            rows = grpo.completion_rows(samples, 1, self.tokenizer)
            with meter("metrics, log"):
                log.step(dict(step=1, tokens_per_s=0.0) | metrics, rows)
        for a, b in zip(samples, self.samples, strict=True):
            assert (
                a.text == b.text
                and (a.completion_ids == b.completion_ids).all()
                and (a.ref_logps == 0).all()
            )
        return meter.seconds, world.received


def total(step: tuple) -> float:
    return sum(step[0][part] for part in PARTS)


def slowest_rank(
    host: Host, size: int, peers: dict, flags: dict, repeats: int
) -> tuple[Counter, Counter]:
    """Of the first and the last rank, by the median of its steps, which is returned."""
    steps = []
    for rank in {0, size - 1}:
        found = sorted([host.step(rank, size, peers, flags) for _ in range(repeats)], key=total)
        steps.append(found[repeats // 2])
    return max(steps, key=total)


def main() -> None:
    args = arguments(__doc__)
    args.jobs = 1
    sizes, ranks, repeats = ((20_000,), (1, 4), 1) if args.quick else (SIZES, RANKS, 3)
    head = ["tokens", "samples", "ranks", *PARTS, "all of these", "decode", "MB received"]
    tables = {name: [[name, *head[1:]]] for name in SETTINGS}
    tokenizer = tokenizer_of(2000 if args.quick else WORDS)
    with tempfile.TemporaryDirectory() as folder:
        for tokens in sizes:
            host = Host(tokens, tokenizer, folder)
            for size in ranks:
                peers = host.peers(size)
                for name, flags in SETTINGS.items():
                    step = slowest_rank(host, size, peers, flags, repeats)
                    seconds = [*(step[0][part] for part in PARTS), total(step), step[0]["decode"]]
                    row = [
                        f"{host.tokens / 1e6:.2f} M",
                        len(host.samples),
                        size,
                        *(f"{x:.2f}" for x in seconds),
                    ]
                    tables[name].append([*row, f"{sum(step[1].values()) / 1e6:.0f}"])
                    print(*tables[name][-1], flush=True)
    save(args, "host", None, *tables.values())


if __name__ == "__main__":
    main()
