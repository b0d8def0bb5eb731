"""GRPO in one file: sample a group of answers per prompt, reward them, push up what beat its own group.

    python grpo.py                                          # bundled tiny model, laptop CPU
    torchrun --nproc_per_node=2 grpo.py                     # the same run, the same gradient, two processes
    torchrun --nproc_per_node=8 grpo.py --model Qwen/Qwen2.5-1.5B-Instruct --train_data train.jsonl --reward gsm8k

The file reads in the order in which it runs: config, prompts, policy, rollout, rewards and advantages, objective,
update, eval, train. What any trainer needs (flags, ranks, files, checkpoints, signals, log) is in harness/.
N = samples, T = completion tokens (padded), L = prompt + completion, V = vocabulary, H = hidden units.
Left out on purpose: critics, FSDP, tools, asynchronous rollouts (README.md says what to use instead).
"""

import contextlib
import dataclasses
import json
import math
import os
import sys
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

if sys.version_info < (3, 11):  # noqa: UP036
    print("grpo.py: error: needs Python 3.11 or newer", file=sys.stderr)
    sys.exit(2)
HERE = os.path.dirname(os.path.abspath(__file__))
sys.modules.setdefault(
    "grpo", sys.modules[__name__]
)  # also as __main__: harness/fast.py imports Policy from here
sys.path.insert(
    0, HERE
)  # the reward.py, view.py and harness beside this file, whatever else has their names
for name in {"reward", "view", "harness"} & set(sys.modules):
    if not (getattr(sys.modules[name], "__file__", None) or "").startswith(HERE):
        del sys.modules[name]

# Before `import torch`: idle OpenMP threads that spin make a step 5 to 30 times slower on busy cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Large CPU tensors in pages of 2 MB: a tenth of the page faults, 0.85 to 0.96 of an update at 30 M parameters.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

from harness import check, flags, log, models, ranks, rows, workers
from harness.arrays import padded, padded_rows, to_device
from harness.checkpoints import find_checkpoint, fingerprint, model_writer, with_run
from harness.flags import ConfigError, TrainingError, first_line, flag, need, say
from harness.log import completion_rows, sample_metrics
from harness.models import load_model
from harness.ranks import World, seed_of
from harness.rows import Prompt
from harness.run import Run
from harness.seeded import SeededSampling
from reward import load_rewards, sources

GENERATE_ROWS = 256  # rows of one HF generate call


# ----------------------------------------------------------------------------------------------------------------
# Config: every field is a flag


@dataclass
class Config:
    model: str = flag(
        "", "policy: a directory or a hub name; empty: the bundled task", group="model and data"
    )
    tokenizer: str = flag("", "directory or hub name of the tokenizer; empty: the model's own")
    train_data: str = flag(
        "", "JSONL, JSON, CSV or parquet file, hub dataset name:config:split, file.py:function"
    )
    eval_data: str = flag("", "held-out rows; empty: no eval")
    reward: str = flag(
        "answer",
        "name[:weight],... or file.py:function[:weight]; the first one is the eval accuracy",
    )
    reward_timeout: float = flag(
        10.0, "seconds that one call of a reward from a file may take", low=1e-6
    )
    reward_failure: str = flag(
        "zero", "a failed reward counts as 0, or its sample is left out", ("zero", "exclude")
    )
    prompt_template: str = flag(
        "", 'made from columns, as in "{question}\\nThink first."; empty: the column prompt'
    )
    chat: bool = flag(False, "string prompts become a user turn of the model's chat template")
    system_prompt: str = flag("", "system message put before every prompt; makes a chat of it")
    chat_template_kwargs: str = flag(
        "", "JSON for the chat template, as in '{\"enable_thinking\": false}'"
    )
    show_prompt: bool = flag(False, "print the first prompt, as text and as ids, and exit")
    max_prompt_length: int = flag(512, "tokens; longer prompts are dropped and counted", low=1)

    num_prompts: int = flag(
        32, "prompts per step, over all ranks", low=1, high=2**20, group="rollout"
    )
    num_generations: int = flag(8, "completions per prompt: the group, G", low=2, high=2**20)
    max_completion_length: int = flag(512, "tokens; a completion that reaches it is cut off", low=1)
    temperature: float = flag(1.0, "of sampling, and of every log-probability", low=1e-6)
    rollout: str = flag(
        "auto", "who samples; auto: vllm where it is installed, else hf", ("auto", "vllm", "hf")
    )
    vllm_gpu_memory_utilization: float = flag(
        0.3, "share of the GPU that the engine samples with", low=1e-3, high=1
    )
    max_sampler_gap: float = flag(
        0.0, "mean |log-probability gap| to the sampler that stops the run; 0: auto", low=0
    )
    tis_cap: float = flag(
        2.0, "truncated importance weight, trainer over sampler, per token; 0: off", low=0
    )

    scale_rewards: str = flag(
        "group", "divide r - mean by the std of", ("group", "batch", "none"), group="objective"
    )
    loss_reduction: str = flag(
        "token", "what weighs the same in the loss", ("token", "sequence", "constant")
    )
    kl_estimator: str = flag("wk3", "KL term of the loss", ("k1", "k2", "k3", "k4", "wk3"))
    kl_in: str = flag("loss", "where the KL penalty acts; reward takes k1 only", ("loss", "reward"))
    beta: float = flag(0.001, "KL coefficient; 0 loads no reference model", low=0)
    clip_low: float = flag(0.2, "the ratio is clipped below 1 - clip_low", low=0, high=1)
    clip_high: float = flag(0.28, "the ratio is clipped above 1 + clip_high", low=0)
    ratio_level: str = flag(
        "token", "importance ratio per token, or per sequence (GSPO)", ("token", "sequence")
    )
    mask_truncated: bool = flag(
        False, "leave cut-off completions out of the loss (not out of the baseline)"
    )
    non_stop_reward: float | None = flag(
        None, "reward of a completion that was cut off; none: as scored"
    )
    advantage_noise: float = flag(
        0.0, "standard deviation of noise added to the advantages (studies only)", low=0
    )

    num_minibatches: int = flag(1, "optimiser steps per pass over a rollout", low=1, group="update")
    num_epochs: int = flag(1, "passes over a rollout", low=1)
    micro_batch_tokens: int = flag(
        0, "tokens of a forward and backward; 0: 2048, on cuda what fits", low=0
    )
    learning_rate: float = flag(1e-6, "AdamW, float32 parameters", low=0)
    lr_schedule: str = flag("constant", "after the warmup", ("constant", "linear", "cosine"))
    warmup_steps: int = flag(
        0, "optimiser steps; 0: the first step already learns at the full rate", low=0
    )
    weight_decay: float = flag(0.0, "of matrices; norms and biases never decay", low=0)
    max_grad_norm: float = flag(1.0, "gradient norm is clipped to this; 0: off", low=0)
    max_steps: int = flag(
        100, "rollouts; each is num_minibatches * num_epochs optimiser steps", low=0
    )
    gradient_checkpointing: bool = flag(
        False, "recompute activations in backward: less memory, a third more time"
    )
    fast: bool = flag(
        True, "rows without padding, head in tiles (harness/fast.py); false: plain PyTorch, slower"
    )
    compile: bool = flag(False, "torch.compile each layer: minutes at the start, faster steps")
    dtype: str = flag(
        "auto", "auto: bfloat16 autocast where fast", ("auto", "float32", "bfloat16", "float64")
    )
    device: str = flag("auto", "auto: cuda, else mps, else cpu", ("auto", "cpu", "cuda", "mps"))
    seed: int = flag(0, "every random number is a function of it and the step", low=0)

    out_dir: str = flag("out", "where the run is written", group="output")
    eval_every: int = flag(
        10, "steps between evals; 0: only before the first and after the last step", low=0
    )
    eval_samples: int = flag(
        0, "samples per eval prompt at --temperature for pass@k; 0: greedy only", low=0
    )
    save_every: int = flag(10, "steps between checkpoints; 0: only after the last step", low=0)
    keep: int = flag(2, "newest checkpoints kept, besides the best by eval accuracy; 0: all", low=0)
    resume: str = flag(
        "", "go on from the newest checkpoint in --out_dir, or from this one", bare="latest"
    )
    verbose: bool = flag(False, "show what vLLM and transformers print, too")
    log_completions: int = flag(
        64, "samples written to completions.jsonl per step; -1: all", low=-1
    )
    log_tokens: int = flag(
        -1,
        "of these, samples with all that is known of each token; -1: the group with most signal",
        low=-1,
    )
    report_to: str = flag(
        "none", "a dashboard to send metrics to", ("none", "tensorboard", "wandb", "trackio")
    )

    def __new__(cls, *values, **named):
        """Notes which fields were given: a value that equals its default may have been."""
        config = super().__new__(cls)
        config.given = (
            dict(zip((f.name for f in dataclasses.fields(cls)), values, strict=False)) | named
        )
        return config

    @property
    def updates_per_step(self) -> int:
        return self.num_minibatches * self.num_epochs


# The bundled task, "R1 in miniature": what applies when no --model is named. Flags that are given win.
BUNDLED = dict(
    model=os.path.join(HERE, "sample_data", "model"),
    train_data=os.path.join(HERE, "sample_data", "train.jsonl"),
    eval_data=os.path.join(HERE, "sample_data", "eval.jsonl"),
    max_completion_length=40, learning_rate=3e-4, max_steps=20, eval_every=5,
)  # fmt: skip


def parse_args(argv=None) -> Config:
    return validate(complete(Config(**flags.parse_flags(Config, argv, "grpo.py", __doc__))))


def complete(cfg: Config) -> Config:
    """The flags that were given, over those of the run that they resume; without a model over the bundled task's."""
    given = with_run(Config, cfg.given)
    if given.get("model"):
        return Config(**given)
    own_rows = dict(eval_data="") if given.get("train_data") else {}
    return Config(
        **(BUNDLED | own_rows | {name: value for name, value in given.items() if name != "model"})
    )


def validate(cfg: Config) -> Config:
    """Impossible values stop here, before anything is loaded or written."""
    flags.check_flags(cfg)
    try:
        options = json.loads(cfg.chat_template_kwargs or "{}")
    except ValueError:
        options = None
    other = cfg.kl_in == "reward" and cfg.beta and cfg.kl_estimator != "k1"
    packages = dict(none=[], tensorboard=["tensorboard"]).get(
        cfg.report_to, [cfg.report_to, "pandas"]
    )
    need(cfg.train_data, cfg, "train_data", "needed, with a --model of your own")
    samples = cfg.num_prompts * cfg.num_generations
    need(cfg.num_minibatches <= samples, cfg, "num_minibatches", "more than the step's samples")
    need(isinstance(options, dict), cfg, "chat_template_kwargs", "must be a JSON object")
    need(
        all(map(log.installed, packages)),
        cfg,
        "report_to",
        f"not installed; pip install {' '.join(packages)}",
    )
    need(
        not other,
        cfg,
        "kl_in",
        f"takes --kl_estimator k1 only: {cfg.kl_estimator} has another gradient there",
    )
    return cfg


def resolved(cfg: Config, model, device: torch.device) -> Config:
    """The values that the flags leave to the model and the device; says what it took, and why."""
    if cfg.dtype == "auto":
        small, fast = models.is_small(model), models.fast_bfloat16(device)
        cfg = dataclasses.replace(cfg, dtype="bfloat16" if fast and not small else "float32")
        why = (
            "the model is small"
            if small
            else f"this {device.type} {'has' if fast else 'has no'} fast bfloat16"
        )
        say(f"--dtype {cfg.dtype} ({why})")
    if cfg.beta and cfg.kl_in == "loss" and cfg.kl_estimator == "k1":
        say(
            "warning: as a loss k1 has an expected gradient of zero, it does not hold the policy near the reference"
        )
    return models.fit_micro_batch(cfg, model, device)


def autocast(cfg: Config, device: torch.device):
    """A pass that learns keeps no casts of weights: it makes each once, and of recomputed layers none has to stay."""
    options = dict(enabled=cfg.dtype == "bfloat16", cache_enabled=not torch.is_grad_enabled())
    return torch.autocast(device.type, torch.bfloat16, **options)


# ----------------------------------------------------------------------------------------------------------------
# Samples, and the prompts that they answer


@dataclass
class Sample:
    """One completion. Arrays without padding: that comes at the last moment, per micro-batch."""

    group: int  # which prompt of the step: an instance, so a prompt drawn twice makes two groups
    prompt: Prompt
    completion_ids: (
        np.ndarray
    )  # [T] int32, the sampled EOS included: stopping is an action, too; and context
    sampler_logps: np.ndarray  # [T] float32
    finish_reason: str  # "stop" or "length"
    text: str = ""
    reward: float = 0.0
    parts: dict = field(default_factory=dict)  # by reward function
    extra: dict = field(default_factory=dict)  # what these logged, by column
    sampled: np.ndarray = (
        None  # [T] bool: the policy drew it. The rest is context, such as what a tool answered
    )
    advantages: np.ndarray = None  # [T] float64
    in_loss: bool = True
    old_logps: np.ndarray | None = (
        None  # [T], before the first update of the step; None: not needed
    )
    ref_logps: np.ndarray | None = None  # [T], likewise
    tokens: dict = field(default_factory=dict)  # what the log shows of each token: see note_tokens

    def __post_init__(self):
        if self.sampled is None:
            self.sampled = np.ones(len(self.completion_ids), bool)
        if self.advantages is None:
            self.advantages = np.zeros(len(self.completion_ids))

    @property
    def n_tokens(self) -> int:
        """Of its row."""
        return len(self.prompt.ids) + len(self.completion_ids)

    @property
    def n_sampled(self) -> int:
        """Its length, wherever the policy is meant."""
        return int(self.sampled.sum())


def prompts_of_step(prompts: list[Prompt], step: int, cfg: Config) -> list[Prompt]:
    """A fresh shuffle per epoch, as a pure function of (seed, step): a resumed run has no position to restore."""
    places = [
        divmod(i, len(prompts)) for i in range((step - 1) * cfg.num_prompts, step * cfg.num_prompts)
    ]
    epochs = {epoch for epoch, _ in places}
    orders = {
        epoch: np.random.default_rng((cfg.seed, epoch)).permutation(len(prompts))
        for epoch in epochs
    }
    return [prompts[orders[epoch][offset]] for epoch, offset in places]


# ----------------------------------------------------------------------------------------------------------------
# Policy: a language model that returns log-probabilities of completion tokens


class Policy(nn.Module):
    """batch: policy.rows(samples) as tensors -> log-probability [N, T] of each completion token, and the entropy [N, T]
    in nats of what it was drawn from (without a gradient). Padding holds anything."""

    packs = False  # see harness/fast.py, which has the same numbers sooner

    def __init__(self, model, temperature: float):
        super().__init__()
        self.model, self.temperature = model, temperature
        self.at_reference = (
            False  # same weights: its KL is rounding, which Adam would make as large as a step
        )

    def rows(self, samples) -> dict:
        return padded_rows(samples)

    def forward(self, batch: dict):
        logps = self.logits(batch).log_softmax(-1)  # [N, T, V]
        entropy = torch.special.entr(logps.detach().exp()).sum(-1)  # -sum p log p
        return logps.gather(-1, batch["completion"][:, :, None])[:, :, 0], entropy

    def logits(self, batch: dict):
        """[N, T, V]: what predicts each completion token is the output at the token before it."""
        logits = self.model(input_ids=batch["ids"], use_cache=False).logits  # [N, L, V]
        logits = logits.take_along_dim(batch["before"][:, :, None], dim=1)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature

    def wrapped(self, device: torch.device) -> None:
        """After DDP has it."""


# ----------------------------------------------------------------------------------------------------------------
# Rollout: token ids in, token ids and log-probabilities out


@dataclass
class Completion:
    ids: np.ndarray  # [T] int32, the sampled EOS included
    logps: np.ndarray  # [T] float32, after temperature
    finish_reason: str


class HFSampler:
    """Hugging Face generate on the policy's own weights: slow, runs everywhere, never stale."""

    def __init__(self, model, eos_ids: list[int], pad_id: int, cfg: Config):
        from transformers import GenerationConfig

        self.model, self.eos_ids, self.pad_id, self.cfg = model, eos_ids, pad_id, cfg
        # A model's own generation config may hold top-p or a repetition penalty: those would sample from a
        # distribution that is not the one being trained.
        self.model.generation_config = GenerationConfig(
            max_new_tokens=cfg.max_completion_length,
            eos_token_id=eos_ids,
            pad_token_id=pad_id,
            do_sample=False,
        )

    def push(self, model):
        """The weights are the policy's own."""

    def sleep(self):
        """It holds no memory of its own."""

    def close(self):
        pass

    @torch.no_grad()
    @torch.compiler.set_stance(
        "force_eager"
    )  # a cache that grows would be compiled at every length
    def generate(self, prompts: list[np.ndarray], n: int, seeds: list[int], temperature: float):
        """n completions for each prompt, sample i from the random stream (seed, i); temperature 0 is greedy."""
        from transformers import LogitsProcessorList

        device, wanted = self.model.device, [(p, i) for p in range(len(prompts)) for i in range(n)]
        wanted.sort(
            key=lambda row: len(prompts[row[0]])
        )  # rows of one call have prompts of similar length
        completions = {}
        for start in range(0, len(wanted), GENERATE_ROWS):
            part = wanted[start : start + GENERATE_ROWS]
            ids = padded([prompts[p] for p, _ in part], np.int64, self.pad_id, left=True)  # [N, P]
            mask = padded([np.ones(len(prompts[p])) for p, _ in part], np.int64, left=True)
            inputs = to_device(dict(input_ids=ids, attention_mask=mask), device)
            streams = [(seeds[p], i) for p, i in part]
            sampling = SeededSampling(streams, temperature, self.cfg.max_completion_length, device)
            with autocast(self.cfg, device), check.as_loaded(self.model):
                out = self.model.generate(
                    **inputs, logits_processor=LogitsProcessorList([sampling])
                )
            tokens = out[:, ids.shape[1] :].cpu().numpy().astype(np.int32)  # [N, T]
            logps = torch.stack(sampling.logps, 1).cpu().numpy()
            ends = np.isin(tokens, self.eos_ids)
            for row, t, lp, end in zip(part, tokens, logps, ends, strict=True):
                length = end.argmax() + 1 if end.any() else len(t)
                completions[row] = Completion(
                    t[:length], lp[:length], "stop" if end.any() else "length"
                )
        return [[completions[p, i] for i in range(n)] for p in range(len(prompts))]


class VLLMSampler:
    """A vLLM engine inside the process of each rank: weights are handed over in memory."""

    def __init__(self, eos_ids: list[int], longest_prompt: int, cfg: Config, world: World):
        from vllm import LLM, SamplingParams

        self.new_params, self.eos_ids, self.cfg = SamplingParams, eos_ids, cfg
        self.cuda, self.asleep = world.device.type == "cuda", False
        self.dtype = torch.bfloat16 if cfg.dtype == "bfloat16" else torch.float32
        length = longest_prompt + cfg.max_completion_length
        options = dict(
            model=cfg.model, dtype=self.dtype, max_model_len=length, seed=cfg.seed,
            skip_tokenizer_init=True, generation_config="vllm", use_tqdm_on_load=False,
            logprobs_mode="processed_logprobs",  # after the temperature, as the trainer's are
            load_format="dummy",  # the first push brings the weights: none are read twice
        )  # fmt: skip
        if self.cuda:
            options |= dict(
                gpu_memory_utilization=cfg.vllm_gpu_memory_utilization, enable_sleep_mode=True
            )
        else:  # chunked prefill: a seeded request whose prompt is divided crashes on a CPU
            options |= dict(
                enforce_eager=True, block_size=32, kv_cache_memory_bytes=models.CACHE_BYTES
            )
            options |= dict(enable_chunked_prefill=False)
        if "RANK" in os.environ:
            options |= dict(distributed_executor_backend="external_launcher")
        self.llm = LLM(**options)

    def push(self, model):
        """In memory, what a checkpoint holds: spoil what is there, reload, repack, forget cached prefixes."""
        from transformers.core_model_loading import revert_weight_conversion

        if self.asleep:  # weights first, the cache only after them: the two peaks never meet
            torch.cuda.empty_cache()
            self.wake_up("weights")
        self.llm.apply_model(models.fill_with_nan)
        weights = {
            name: p.detach() for name, p in model.named_parameters()
        }  # a tied head is in it once
        weights |= {
            name: model.get_buffer(name)
            for name in dict(model.named_buffers()).keys() & model.state_dict()
        }
        weights = revert_weight_conversion(
            model, weights
        )  # the names of checkpoints, which the engine knows (MoE)
        self.llm.collective_rpc(
            "reload_weights", kwargs=dict(weights_iterator=iter(weights.items()))
        )
        self.llm.apply_model(models.repack)
        if not self.llm.reset_prefix_cache():  # its keys and values are the old policy's
            raise TrainingError("vLLM did not reset its prefix cache after a push of new weights")
        if self.asleep:
            self.wake_up("kv_cache")
            self.asleep = False

    def sleep(self):
        """Gives the GPU to the trainer. Level 2 drops the weights, too: the next push brings them."""
        if self.cuda and not self.asleep:
            [keeps] = self.llm.apply_model(models.has_alibi)
            self.llm.sleep(level=1 if keeps else 2)
            self.asleep = True

    def wake_up(self, tag: str):
        try:
            self.llm.wake_up(tags=[tag])
        except RuntimeError as error:  # what vLLM's allocator raises
            raise torch.OutOfMemoryError(
                f"vLLM cannot wake up its {tag}: {first_line(error)}."
            ) from error

    def close(self):
        self.llm.llm_engine.engine_core.shutdown()

    def generate(self, prompts: list[np.ndarray], n: int, seeds: list[int], temperature: float):
        """As HFSampler.generate; vLLM seeds sample i with seed + i, on a CPU with 32 bits of it."""
        params = [
            self.new_params(
                n=n, seed=seed % 2**32, temperature=temperature, max_tokens=self.cfg.max_completion_length,
                stop_token_ids=self.eos_ids, logprobs=0, flat_logprobs=True, detokenize=False,
            )
            for seed in seeds
        ]  # fmt: skip
        requests = self.llm.generate(
            [{"prompt_token_ids": p.tolist()} for p in prompts], params, use_tqdm=False
        )
        return [[self.completion(c) for c in request.outputs] for request in requests]

    def completion(self, output) -> Completion:
        flat = output.logprobs  # with logprobs=0 one entry a token: the sampled one
        if flat is None or list(flat.token_ids) != list(output.token_ids):
            raise TrainingError("vLLM returned a token without its log-probability")
        logps = np.array(flat.logprobs, np.float32)
        if not np.isfinite(logps).all() or output.finish_reason not in ("stop", "length"):
            raise TrainingError(
                f"vLLM returned non-finite log-probabilities or a broken completion ({output.finish_reason}): some "
                "weights of the engine were not set by the last push, or the policy itself is not finite"
            )
        return Completion(np.array(output.token_ids, np.int32), logps, output.finish_reason)


def make_sampler(kind: str, model, eos_ids, pad_id, longest_prompt: int, cfg: Config, world: World):
    if kind == "hf":
        return HFSampler(model, eos_ids, pad_id, cfg)
    say(
        "vLLM starts"
        + (
            ", which compiles for one to three minutes on a GPU"
            if world.device.type == "cuda"
            else ""
        )
    )
    try:
        return VLLMSampler(eos_ids, longest_prompt, cfg, world)
    except Exception as error:
        raise TrainingError(
            f"vllm did not start: {first_line(error)} (--rollout hf does without)"
        ) from error


def sample(
    sampler, prompts, n, temperature, stream, step, tokenizer, cfg: Config, world: World
) -> list[Sample]:
    """n samples for each of this rank's share of the prompts, seeded by (seed, stream, step, prompt) alone."""
    mine = range(world.rank, len(prompts), world.size)
    seeds = [seed_of(cfg.seed, stream, step, group) for group in mine]
    groups = sampler.generate([prompts[g].ids for g in mine], n, seeds, temperature)
    return [
        Sample(
            g,
            prompts[g],
            c.ids,
            c.logps,
            c.finish_reason,
            decode(tokenizer, c.ids, sampler.eos_ids),
        )
        for g, completions in zip(mine, groups, strict=True)
        for c in completions
    ]


def decode(tokenizer, ids: np.ndarray, eos_ids: list[int]) -> str:
    """For the rewards and the eye only: everything but the token that ended it, so that a reward sees a <think> that is
    a special token. Ids beyond the tokenizer (a padded vocabulary) have no text."""
    ids = ids[:-1] if len(ids) and ids[-1] in eos_ids else ids
    return tokenizer.decode(ids[ids < len(tokenizer)].tolist())


# ----------------------------------------------------------------------------------------------------------------
# Rewards and advantages


def score(samples: list[Sample], scorer, step: int, cfg: Config) -> workers.Scores:
    """Fills in the rewards: NaN where none applies, or where one failed and --reward_failure says exclude."""
    state = dict(global_step=step - 1, max_steps=cfg.max_steps)
    known = [
        s.prompt.row
        | dict(
            prompt_text=s.prompt.text,
            prompt_messages=s.prompt.messages,
            completion_ids=s.completion_ids.tolist(),
        )
        | dict(completion_length=s.n_sampled, max_completion_length=cfg.max_completion_length)
        | dict(finish_reason=s.finish_reason, trainer_state=state)
        for s in samples
    ]
    scores = scorer.score([s.text for s in samples], known)
    for i, sample in enumerate(samples):
        sample.reward = scores.totals[i]
        sample.parts = {name: values[i] for name, values in scores.parts.items()}
        sample.extra = {name: values[i] for name, values in scores.extra.items()}
        if sample.finish_reason == "length" and cfg.non_stop_reward is not None:
            sample.reward = cfg.non_stop_reward
        if scores.failed[i] and cfg.reward_failure == "exclude":
            sample.reward = math.nan
    return scores


def group_advantages(rewards, group_size: int, scale: str = "group", eps: float = 1e-4):
    """How much better than its own group each sample did. rewards [N], groups consecutive -> [N].

    "group": (r - mean) / (std + eps) (DeepSeekMath, arXiv 2402.03300); std with ddof 1 and eps as in TRL.
    "batch": the same mean, std over the whole step. "none": r - mean (Dr. GRPO, arXiv 2503.20783).
    A group whose rewards are all equal gives exactly 0. A NaN reward takes no part and gets 0.
    """
    grouped = rewards.double().view(-1, group_size)  # [N / G, G]
    there = ~grouped.isnan()
    centred = torch.where(there, grouped - grouped.nanmean(1, keepdim=True), 0.0)
    # float noise must not become a signal: 0.1 + 0.2 and 0.3 are the same reward, up to units in the last place
    noise = 4 * torch.finfo(torch.float64).eps * grouped.nan_to_num(0.0).abs().amax(1, keepdim=True)
    centred = torch.where(centred.abs().amax(1, keepdim=True) <= noise, 0.0, centred)
    if scale == "group":
        count = there.sum(1, keepdim=True)
        std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        centred = centred / (std + eps)
    elif scale == "batch":
        centred = centred / ((grouped[there].std() if there.sum() > 1 else 0.0) + eps)
    return centred.flatten().to(rewards.dtype)


def assign_advantages(samples: list[Sample], step: int, cfg: Config) -> float:
    """Advantages of the step's full list, so that a group can never be split wrongly. Returns the share of groups whose
    rewards are all equal."""
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    advantages = group_advantages(rewards, cfg.num_generations, cfg.scale_rewards)
    no_signal = (advantages.view(-1, cfg.num_generations) == 0).all(1).double().mean().item()
    noise = np.random.default_rng((cfg.seed, step, 1)).normal(
        0.0, cfg.advantage_noise, len(samples)
    )
    for sample, advantage, eta in zip(samples, advantages.tolist(), noise, strict=True):
        sample.advantages = np.full(len(sample.completion_ids), advantage + eta)
        cut_off = cfg.mask_truncated and sample.finish_reason == "length"
        sample.in_loss = not cut_off and not math.isnan(sample.reward)
    return no_signal


# ----------------------------------------------------------------------------------------------------------------
# Objective


def kl_estimate(logps, ref_logps, old_logps, estimator: str):
    """Per-token estimates of KL(policy || reference), all [N, T], from samples of the old policy.

    With d = log(policy / reference) and w = policy / old policy: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d
    (Schulman, joschu.net/blog/kl-approx.html), k4 = w k1, wk3 = w k3 (DeepSeek-V3.2, arXiv 2512.02556). As losses,
    only k2 (on-policy), k4 and wk3 have the KL's gradient: k1's is zero on average, k3's is biased far from the
    reference. The identity behind wk3: d(w k3)/dlogp = w k1.
    """
    d = logps - ref_logps
    w = bounded(logps - old_logps).exp()
    k3 = torch.expm1(bounded(-d)) + d
    if (
        estimator == "wk3"
    ):  # the value, and by the identity the slope: no exponential of -d, which cancels from 18 on
        return (w * k3).detach() + (w * d).detach() * (logps - logps.detach())
    return {"k1": d, "k2": d.square() / 2, "k3": k3, "k4": w * d}[estimator]


def bounded(exponent):
    """At most 20 as a value, with the slope of all of it: float32 overflows, and a clamped slope would be none."""
    return exponent - (exponent - 20).clamp(min=0).detach()


def grpo_loss(
    logps, old_logps, ref_logps, sampler_logps, advantages, mask, cfg, n_tokens, n_sequences
):
    """One micro-batch's share of the step's loss: a sum, whose weights carry the step's GLOBAL counts.

    logps, old_logps, ref_logps (None: no KL), sampler_logps (None: no correction), mask: [N, T]; advantages [N] or
    [N, T]; n_tokens, n_sequences: counts over all micro-batches and ranks of the optimiser step. The sum over any
    split of the samples is the whole batch's loss. Returns (loss, stats), stats being sums over tokens, too.
    """
    mask = mask.bool()

    def real(x):  # padding may hold anything, inf and nan too: neither value nor gradient sees it
        return torch.where(mask, x, torch.zeros_like(x))

    logps, old_logps = real(logps), real(old_logps)
    advantages = real(
        (advantages[:, None] if advantages.dim() == 1 else advantages).expand_as(logps)
    )
    ref_logps = None if ref_logps is None else real(ref_logps)
    lengths = mask.sum(1, keepdim=True).clamp(min=1)  # [N, 1]

    if ref_logps is not None and cfg.kl_in == "reward":
        k1 = (old_logps - ref_logps).detach()
        to_go = (
            k1.flip(1).cumsum(1).flip(1)
        )  # a token answers for the KL of itself and what follows
        advantages = advantages - cfg.beta * to_go

    log_ratio = logps - old_logps
    if cfg.ratio_level == "sequence":
        # / lengths: the geometric mean of the token ratios (GSPO, arXiv 2507.18071, eq. 7); with each token's own
        # gradient (GSPO-token, eq. 14): the same where a sequence has one advantage, and right where it has not
        log_ratio = (log_ratio.sum(1, keepdim=True) / lengths).detach() + logps - logps.detach()
    ratio = bounded(log_ratio).exp()
    clipped_ratio = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    per_token = -torch.minimum(ratio * advantages, clipped_ratio * advantages)  # [N, T]
    if sampler_logps is not None and cfg.tis_cap > 0:
        # the samples came from the sampler's distribution: truncated importance sampling towards the trainer's
        per_token = per_token * (old_logps - real(sampler_logps)).detach().exp().clamp(
            max=cfg.tis_cap
        )
    if ref_logps is not None and cfg.kl_in == "loss" and cfg.beta > 0:
        per_token = per_token + cfg.beta * kl_estimate(
            logps, ref_logps, old_logps, cfg.kl_estimator
        )

    if cfg.loss_reduction == "token":
        weight = 1 / n_tokens  # every token of the step weighs the same (DAPO, arXiv 2503.14476)
    elif cfg.loss_reduction == "sequence":
        # every completion weighs the same, whatever its length (GRPO)
        weight = 1 / (lengths * n_sequences).to(logps.dtype)
    else:
        weight = 1 / (
            n_sequences * cfg.max_completion_length
        )  # a constant: no length bias (Dr. GRPO)
    loss = (real(per_token) * weight).sum()

    with torch.no_grad():
        clipped = real(
            ((ratio * advantages) > (clipped_ratio * advantages)).float()
        )  # where clipping acts
        stats = {"tokens": mask.sum(), "clip_ratio/region_mean": clipped.sum()}
        if ref_logps is not None:
            stats |= {"kl": kl_estimate(logps, ref_logps, logps, "k3").sum()}
            stats |= {"kl_k1": kl_estimate(logps, ref_logps, logps, "k1").sum()}
    return loss, stats


# ----------------------------------------------------------------------------------------------------------------
# Update: deal samples to ranks, micro-batches, backward, one optimiser step per mini-batch


def plan(samples: list[Sample], packs: bool, cfg: Config, world: World) -> list[list[list[Sample]]]:
    """The micro-batches of every rank: lists of samples of at most cfg.micro_batch_tokens tokens.

    Packed rows hold a group's prompt once, so groups stay together; padded rows are as wide as
    their longest sample, so samples go by length. Either way the longest come first.
    """
    if packs:
        longest = {}
        for s in samples:
            longest[s.group] = max(longest.get(s.group, 0), len(s.completion_ids))
        samples = sorted(samples, key=lambda s: (-longest[s.group], s.group))
    else:
        samples = sorted(samples, key=lambda s: -s.n_tokens)

    # What each sample adds to a row that goes on: a known prompt is not stored again.
    costs = []
    for i, s in enumerate(samples):
        knows_prompt = packs and i > 0 and samples[i - 1].group == s.group
        costs.append(len(s.completion_ids) if knows_prompt else s.n_tokens)

    # Deal: a sample goes to the rank in whose share of all tokens its middle lies.
    shares = [[] for _ in range(world.size)]
    done, total = 0, sum(costs)
    for s, cost in zip(samples, costs, strict=True):
        rank = int((done + cost / 2) * world.size // total)
        shares[rank].append((s, cost))
        done += cost
    return [micro_batches(share, packs, cfg.micro_batch_tokens) for share in shares]


def micro_batches(share: list[tuple[Sample, int]], packs: bool, budget: int) -> list[list[Sample]]:
    """Fills one micro-batch after the other. The last token of a packed text is not stored: nothing follows it."""
    batches, tokens = [], 0
    for s, cost in share:
        added = cost - 1 if packs else (batches[-1][0].n_tokens if batches else 0)
        if not batches or tokens + added > budget:
            batches.append([s])
            tokens = s.n_tokens - 1 if packs else s.n_tokens
        else:
            batches[-1].append(s)
            tokens += added
    return batches


def collate(samples: list[Sample], policy: Policy, device: torch.device) -> dict:
    """Tensors of one micro-batch: its rows of tokens, as this policy takes them, and what the loss needs."""
    batch = policy.rows(samples)
    batch |= dict(
        mask=padded(
            [s.sampled & s.in_loss for s in samples], bool
        ),  # [N, T]: sampled, and in the loss
        advantages=padded([s.advantages for s in samples], np.float32),  # [N, T]
    )
    for name in ("sampler_logps", "old_logps", "ref_logps"):
        if getattr(samples[0], name) is not None:  # all of a micro-batch have it or none
            values = [getattr(s, name) for s in samples]
            batch[name] = padded(values, values[0].dtype)  # [N, T]
    return to_device(batch, device)


@torch.no_grad()
def compute_logps(
    policy: Policy, samples: list[Sample], name: str, cfg: Config, world: World
) -> None:
    """Log-probabilities of the samples under `policy`, shared out over the ranks, stored as `sample.name` on each."""
    numbered = {id(s): i for i, s in enumerate(samples)}
    results = []
    for micro in plan(samples, policy.packs, cfg, world)[world.rank]:
        with autocast(cfg, world.device):
            logps, _ = policy(collate(micro, policy, world.device))
        for sample, row in zip(micro, logps.cpu().numpy(), strict=True):
            results.append((numbered[id(sample)], row[: len(sample.completion_ids)]))
    for i, logps in world.gather(results):
        setattr(samples[i], name, logps)


def minibatches(samples: list[Sample], step: int, cfg: Config):
    """num_epochs passes over the samples in num_minibatches parts, whose sizes need not divide anything."""
    for epoch in range(cfg.num_epochs):
        order = np.random.default_rng((cfg.seed, step, 2, epoch)).permutation(len(samples))
        for part in np.array_split(order, cfg.num_minibatches):
            yield [samples[i] for i in part]


def learning_rate_at(update: int, cfg: Config) -> float:
    """Rate of the optimiser step number `update` (from 0): a pure function, so a resume has no schedule to restore."""
    total = cfg.max_steps * cfg.updates_per_step
    warmup = min(1.0, (update + 1) / cfg.warmup_steps) if cfg.warmup_steps else 1.0
    progress = max(0, update - cfg.warmup_steps) / max(1, total - cfg.warmup_steps)  # in [0, 1)
    decay = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }
    return cfg.learning_rate * warmup * decay[cfg.lr_schedule]


def make_optimizer(policy: Policy, cfg: Config):
    matrices = [p for p in policy.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in policy.parameters() if p.requires_grad and p.dim() < 2]
    groups = [
        dict(params=matrices, weight_decay=cfg.weight_decay),
        dict(params=vectors, weight_decay=0.0),
    ]
    # fused: one pass over parameters and moments instead of a dozen, a fifth of the time on a CPU
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=cfg.learning_rate, fused=True)


NO_GRADIENT = ("left_out", "nothing_sampled", "no_advantage", "at_reference")


def no_gradient(sample: Sample, cfg: Config, at_reference: bool = False) -> str:
    """Why the loss has no gradient in any token of this sample: one of NO_GRADIENT, or "" if it has one."""
    if not sample.in_loss:
        return "left_out"
    if not sample.sampled.any():
        return "nothing_sampled"
    if sample.advantages[sample.sampled].any():
        return ""
    if not cfg.beta:
        return "no_advantage"
    return "at_reference" if at_reference else ""  # else the KL pulls


def update(
    policy, ddp, optimizer, samples: list[Sample], step: int, cfg: Config, world: World
) -> dict:
    """All optimiser steps of one rollout. Every rank holds all samples, so counts and shares need no collective."""
    totals, losses, norms, mismatch = {}, [], [], {}
    skipped = dict.fromkeys(
        ("not_finite", *NO_GRADIENT), 0
    )  # optimiser steps that were not taken, by cause
    for number, minibatch in enumerate(minibatches(samples, step, cfg)):
        lr = learning_rate_at((step - 1) * cfg.updates_per_step + number, cfg)
        for group in optimizer.param_groups:
            group["lr"] = lr
        sums, log_ratio = backward(policy, ddp, minibatch, cfg, world)
        parts = world.gather([sums])
        for name in sums:  # sums and counts over the ranks, never means of means
            totals[name] = totals.get(name, 0.0) + sum(part[name] for part in parts)
        losses.append(totals.pop("loss"))
        if (
            not mismatch
        ):  # of the first tokens in the loss; may stop the run: before anything changes
            mismatch = log.gap_metrics(log_ratio, cfg, world)

        norm = nn.utils.clip_grad_norm_(
            policy.parameters(), cfg.max_grad_norm or math.inf
        ).item()  # before clipping
        norms.append(norm)
        causes = [no_gradient(s, cfg, policy.at_reference) for s in minibatch]
        if not math.isfinite(norm):
            skipped["not_finite"] += (
                1  # the reduced gradient is the same on all ranks: all of them skip
            )
        elif all(causes):
            skipped[max(NO_GRADIENT, key=causes.count)] += 1  # momentum alone would act
        else:
            optimizer.step()
            policy.at_reference = False
        # one process: freed until the next update; else kept: dropped, it leaves DDP's buckets and exists twice
        optimizer.zero_grad(set_to_none=world.size == 1)

    tokens = max(1, totals.pop("tokens"))
    means = dict(loss=float(np.mean(losses)), grad_norm=float(np.mean(norms)))  # over the updates
    means |= {name: value / tokens for name, value in totals.items()}
    means |= {f"skipped_steps/{cause}": count for cause, count in skipped.items()}
    means |= dict(frac_no_gradient=float(np.mean([bool(no_gradient(s, cfg)) for s in samples])))
    return means | dict(learning_rate=lr, skipped_steps=skipped["not_finite"]) | mismatch


def backward(policy, ddp, minibatch: list[Sample], cfg: Config, world: World) -> tuple:
    """The gradient of one optimiser step, in micro-batches. Returns this rank's sums over tokens, and its log-ratios of
    trainer and sampler, inf where nothing was drawn."""
    counted = [s for s in minibatch if s.in_loss]
    n_sequences = max(1, len(counted))
    n_tokens = max(1, sum(s.n_sampled for s in counted))
    learned = [s for s in minibatch if not no_gradient(s, cfg)]  # the others get no pass
    passed = (
        learned or counted[:1] or minibatch[:1]
    )  # at least one: DDP waits for a backward on every rank
    shares = plan(passed, policy.packs, cfg, world)
    rounds = max(map(len, shares))  # a rank with fewer joins in with weight zero: none waits
    sums, log_ratios = (
        {},
        [],
    )  # they stay on the device until the last micro-batch: no pass waits for them
    for i in range(rounds):
        idle = i >= len(shares[world.rank])
        micro = passed[:1] if idle else shares[world.rank][i]
        batch = collate(micro, policy, world.device)
        mask = batch["mask"] & (not idle)
        last = i == rounds - 1  # gradients are averaged over the ranks in the last backward only
        with contextlib.nullcontext() if last or world.size == 1 else ddp.no_sync():
            with autocast(cfg, world.device):
                logps, entropy = ddp(batch)  # [N, T]
            # one update per rollout: the old policy is the current one, the ratio is exactly 1
            old_logps = batch.get("old_logps", logps.detach())
            loss, stats = grpo_loss(
                logps, old_logps, batch.get("ref_logps"), batch["sampler_logps"], batch["advantages"], mask, cfg,
                n_tokens=n_tokens, n_sequences=n_sequences,
            )  # fmt: skip
            (
                loss * world.size
            ).backward()  # * ranks: DDP takes the mean, the weights already hold global counts
        stats |= {"loss": loss.detach(), "entropy": torch.where(mask, entropy, 0).sum()}
        for name, value in stats.items():
            sums[name] = sums.get(name, 0.0) + value
        log_ratios.append(torch.where(mask, old_logps - batch["sampler_logps"], math.inf).flatten())
    values = torch.stack(list(sums.values())).tolist()  # one wait for the device
    return dict(zip(sums, values, strict=True)), torch.cat(log_ratios)


def note_tokens(policy: Policy, samples: list[Sample], cfg: Config, world: World) -> None:
    """Fills in what the log shows of each token of a few samples, before the update, by one more forward of these: in
    thousandths of a nat logp, entropy, gap to the sampler, kl (logp - reference) and, in thousandths of an advantage,
    push: how strongly the update will make the token more likely, minus the gradient of the loss by its logp."""
    counted = [s for s in samples if s.in_loss]
    n_tokens = max(1, sum(s.n_sampled for s in counted))
    [micro_batches] = plan(
        log.samples_to_note(samples, cfg), policy.packs, cfg, World(0, 1, world.device)
    )
    for micro in micro_batches:
        batch = collate(micro, policy, world.device)
        with torch.no_grad(), autocast(cfg, world.device):
            logps, entropy = policy(batch)  # [N, T]
        logps.requires_grad_()  # a leaf: the loss without the model
        old_logps = batch.get("old_logps", logps.detach())
        loss, _ = grpo_loss(
            logps, old_logps, batch.get("ref_logps"), batch["sampler_logps"], batch["advantages"], batch["mask"], cfg,
            n_tokens=n_tokens, n_sequences=len(counted),
        )  # fmt: skip
        [slope] = torch.autograd.grad(loss, logps)
        columns = dict(
            logp=logps,
            gap=old_logps - batch["sampler_logps"],
            entropy=entropy,
            push=-slope * n_tokens,
        )
        if "ref_logps" in batch:
            columns["kl"] = logps - batch["ref_logps"]
        for name, values in columns.items():
            values = torch.where(batch["mask"], values.detach(), 0)
            thousandths = (1000 * values).nan_to_num(0, 0, 0).round().long().tolist()
            for sample, row in zip(micro, thousandths, strict=True):
                sample.tokens[name] = row[: len(sample.completion_ids)]


# ----------------------------------------------------------------------------------------------------------------
# Eval


def evaluate(
    sampler, prompts: list[Prompt], tokenizer, scorer, step: int, cfg: Config, world: World
) -> dict:
    """Greedy accuracy (the first reward) on held-out prompts, over all ranks, and pass@k at --temperature."""

    def drawn(n, temperature):
        samples = sample(sampler, prompts, n, temperature, 1, step, tokenizer, cfg, world)
        scores = world.gather([score(samples, scorer, step, cfg)])
        for line in [s.first_failure for s in scores if s.first_failure][:1]:
            say(f"eval of step {step}: {line}")
        found = world.gather(
            [(s.group, next(iter(s.parts.values())), s.n_sampled) for s in samples]
        )
        found.sort(key=lambda item: item[0])
        values = np.array([value for _, value, _ in found]).reshape(-1, n)  # [prompts, n]
        return values, float(np.mean([length for *_, length in found]))

    values, length = drawn(1, 0.0)
    there = values[~np.isnan(values)]  # a reward may not apply to a row
    stderr = there.std(ddof=1) / math.sqrt(len(there)) if len(there) > 1 else 0.0
    accuracy = float(there.mean()) if len(there) else math.nan
    metrics = dict(eval_accuracy=accuracy, eval_stderr=float(stderr), eval_length=length)
    if k := cfg.eval_samples:
        values, _ = drawn(k, cfg.temperature)
        right = values[~np.isnan(values).any(1)] > 0.5  # [prompts that it applies to, k]
        if len(right):
            metrics |= {
                "eval_pass@1": float(right.mean()),
                f"eval_pass@{k}": float(right.any(1).mean()),
            }
    return metrics


# ----------------------------------------------------------------------------------------------------------------
# Train


def wrap(policy: Policy, cfg: Config, world: World):
    """After the engine: it may move this thread to another stream for good, and then finds more memory free."""
    if cfg.compile:
        models.compile_layers(policy.model, cfg)
    ddp = policy
    if world.size > 1:
        ids = [world.device.index] if world.device.type == "cuda" else None
        ddp = DistributedDataParallel(policy, device_ids=ids, gradient_as_bucket_view=True)
    policy.wrapped(world.device)
    return ddp


def make_policy(model, cfg: Config, prompts=()) -> Policy:
    """prompts: on rows as long as they make them, too, its numbers must be those of the model."""
    try:
        if not cfg.fast:
            policy = Policy(model, cfg.temperature)
            check.choose_attention(policy)
            return policy
        from harness.fast import FastPolicy

        policy = FastPolicy(model, cfg.temperature)
        if prompts:
            longest = max(len(p.ids) for p in prompts) + cfg.max_completion_length
            check.settle(
                policy,
                np.concatenate([p.ids for p in prompts[:100]]),
                longest,
                cfg.micro_batch_tokens,
            )
        return policy
    except ValueError as error:
        raise ConfigError(f"--model {cfg.model}: {error}") from None


def load_reference(cfg: Config, device: torch.device, identity: int | None) -> Policy:
    """The frozen policy that the KL is measured from. identity: the weights' fingerprint at the start of the run."""
    model = load_model(cfg.model, cfg).to(device).requires_grad_(False)
    if identity not in (None, fingerprint(model)):
        why = "not the weights that this run began with, so its KL would be measured from another reference"
        raise ConfigError(f"--model {cfg.model}: {why}; name those, or --beta 0")
    reference = make_policy(model, cfg)  # before the cast: it looks at the model without autocast
    tied = model.get_input_embeddings().weight
    for module in model.modules() if cfg.dtype == "bfloat16" else []:
        if isinstance(module, nn.Linear) and module.weight is not tied:
            module.to(
                torch.bfloat16
            )  # as autocast would, at every forward: the same numbers in half the memory
    return reference


def load_policies(cfg: Config, checkpoint, prompts: list[Prompt], device: torch.device) -> tuple:
    """The policy, from the checkpoint or --model, and the reference that its KL is measured from; the flags with what
    these decide; the fingerprint of the weights at the start of the run."""
    model = load_model(checkpoint.path if checkpoint else cfg.model, cfg).to(device)
    models.freeze_unused(model)
    if models.is_small(model) and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # on small matrices threads cost more than they bring
    cfg = resolved(cfg, model, device)
    identity = checkpoint.state["identity"] if checkpoint else fingerprint(model)
    models.check_sizes(model, prompts, cfg)
    policy = make_policy(model, cfg, prompts)
    if cfg.fast and not policy.packs:
        say(
            "rows are padded, and a prompt is computed for each completion: this model lets texts in one row mix"
        )
    reference = load_reference(cfg, device, identity) if cfg.beta > 0 else None
    policy.at_reference = reference is not None and models.same_weights(model, reference.model)
    return cfg, policy, reference, identity


def load_data(cfg: Config) -> tuple:
    """Rewards, tokenizer, train and eval prompts."""
    try:
        rewards = load_rewards(cfg.reward)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"--reward {cfg.reward}: {error}") from None
    tokenizer = rows.load_tokenizer(cfg)
    train_prompts = rows.load_prompts("train_data", rewards, tokenizer, cfg)
    eval_prompts = rows.load_prompts("eval_data", rewards, tokenizer, cfg) if cfg.eval_data else []
    return rewards, tokenizer, train_prompts, eval_prompts


@contextlib.contextmanager
def set_up(cfg: Config, command_line: bool):
    """Everything before the first step, and the end of it all. What can be wrong with flags and files is found first,
    by every rank by itself; only then is anything written."""
    started = time.monotonic()
    cfg = validate(complete(cfg))
    device = ranks.pick_device(cfg.device)
    models.keep_freed_memory(device)
    models.quiet_transformers(cfg.verbose)
    rewards, tokenizer, train_prompts, eval_prompts = load_data(cfg)
    prompts = train_prompts + eval_prompts
    checkpoint = find_checkpoint(cfg)  # None: from the beginning
    cfg, policy, reference, identity = load_policies(cfg, checkpoint, prompts, device)
    eos_ids, pad_id = models.special_ids(policy.model, tokenizer, cfg)
    kind, why = models.choose_sampler(cfg, device, models.is_small(policy.model))

    world = ranks.join_world(device)
    with Run(cfg, world, checkpoint, started, command_line, sources(rewards)) as run:
        cfg = run.cfg  # with the directory that is its own
        if cfg.fast:
            packs = all(
                world.gather([policy.packs])
            )  # the ranks share samples out by it, so they agree
            for each in (policy, reference) if reference else (policy,):
                check.use_rows(each, packs)
        longest = max(len(p.ids) for p in prompts)
        sampler = make_sampler(kind, policy.model, eos_ids, pad_id, longest, cfg, world)
        scorer = workers.Scorer(rewards, timeout=cfg.reward_timeout)
        run.exits.callback(sampler.close)
        run.exits.callback(scorer.close)
        optimizer = make_optimizer(policy, cfg)
        writer = model_writer(policy.model, tokenizer, checkpoint.path if checkpoint else cfg.model)
        run.track(policy.model, optimizer, writer, identity)
        counts = f"{len(train_prompts)} train and {len(eval_prompts)} eval prompts"
        run.introduce(Config(), f"{counts}, rollouts by {kind} ({why})")
        say(
            "watch reward, eval accuracy, grad and no-signal, not the loss: its value is beta * KL, 0 at first (with "
            "--loss_reduction token: minus the covariance of advantage and length, over the mean length) while its "
            "gradient is not 0"
        )
        yield SimpleNamespace(
            cfg=cfg, run=run, world=world, policy=policy, reference=reference, optimizer=optimizer, sampler=sampler,
            scorer=scorer, tokenizer=tokenizer, train_prompts=train_prompts, eval_prompts=eval_prompts,
        )  # fmt: skip


def train(cfg: Config, command_line: bool = False) -> list[dict]:
    """The whole run; returns the lines of metrics.jsonl. command_line: a stop ends the process."""
    if cfg.show_prompt:
        first = load_data(validate(complete(cfg)))[2][0]
        say(f"{first.text}\n{first.ids.tolist()}")
        return []
    with set_up(cfg, command_line) as parts:
        cfg, world, run = parts.cfg, parts.world, parts.run
        policy, reference, sampler, tokenizer = (
            parts.policy,
            parts.reference,
            parts.sampler,
            parts.tokenizer,
        )
        ddp = wrap(policy, cfg, world)
        synchronise(parts, run.first)
        for step in run.steps():
            with run.clock("rollout"):
                prompts = prompts_of_step(parts.train_prompts, step, cfg)
                samples = sample(
                    sampler,
                    prompts,
                    cfg.num_generations,
                    cfg.temperature,
                    0,
                    step,
                    tokenizer,
                    cfg,
                    world,
                )
                sampler.sleep()
            with run.clock("reward"):
                scores = world.gather([score(samples, parts.scorer, step, cfg)])
                samples = sorted(world.gather(samples), key=lambda s: s.group)
            failures = run.failures(scores, step, len(samples))
            no_signal = assign_advantages(samples, step, cfg)
            with run.clock("logps"):
                counted = [
                    s for s in samples if s.in_loss
                ] or samples  # the others get no pass, unless all are out
                if cfg.updates_per_step > 1:
                    compute_logps(policy, counted, "old_logps", cfg, world)
                if reference:
                    compute_logps(reference, counted, "ref_logps", cfg, world)
            with run.clock("update"):
                note_tokens(policy, samples, cfg, world)
                metrics = update(policy, ddp, parts.optimizer, samples, step, cfg, world)
            metrics |= (
                dict(frac_reward_zero_std=no_signal) | sample_metrics(samples, cfg) | failures
            )
            run.record(step, metrics, completion_rows(samples, step, tokenizer))
            synchronise(parts, step)
        del ddp  # before its process group, which the engine may end
    return run.log.history


def synchronise(p, step: int) -> None:
    """The sampler gets the weights; an eval follows where one is due."""
    with p.run.clock("sync"):
        p.sampler.push(p.policy.model)
    if p.run.eval_due(step):
        p.run.record_eval(
            step, evaluate(p.sampler, p.eval_prompts, p.tokenizer, p.scorer, step, p.cfg, p.world)
        )


@record  # torchrun's report then names the rank that failed first, and why
def main() -> int:
    less_memory = "lower --micro_batch_tokens or --vllm_gpu_memory_utilization, --gradient_checkpointing, --beta 0"
    return flags.exit_code("grpo.py", lambda: train(parse_args(), command_line=True), less_memory)


if __name__ == "__main__":
    sys.exit(main())
