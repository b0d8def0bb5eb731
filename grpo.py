"""GRPO in one file: sample a group of answers for each prompt, score them, and make the answers
that beat their own group's mean more likely.

    python grpo.py                               # bundled tiny model, laptop CPU
    torchrun --nproc_per_node=2 grpo.py          # the same run, the same gradient, two processes
    torchrun --nproc_per_node=8 grpo.py --model Qwen/Qwen2.5-1.5B-Instruct \\
        --train_data train.jsonl --reward gsm8k

The sections: config, flags, model, samples, rollout, rewards and advantages, objective, update,
eval, train. To read the file as it runs, begin with `train`, the last one. harness/ has what every
trainer needs (flags, ranks, files, checkpoints, signals, log) and a faster policy.

Shapes: N samples, T completion tokens (padded), L prompt and completion tokens, V = vocabulary
size, G samples in a group (one prompt).
Left out on purpose: critics, FSDP, asynchronous rollouts (README.md names alternatives).
"""

import contextlib
import dataclasses
import inspect
import math
import os
import re
import sys
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

if sys.version_info < (3, 11):  # noqa: UP036
    print("grpo.py: error: needs Python 3.11 or newer", file=sys.stderr)
    sys.exit(2)

# Import the reward.py, view.py and harness next to this file, even if this process has already
# imported other modules of these names, such as those of a second copy of the project.
HERE = os.path.dirname(os.path.realpath(__file__))
sys.path.insert(0, HERE)
for name, module in list(sys.modules.items()):
    if name.split(".")[0] in ("reward", "view", "harness"):
        if not str(getattr(module, "__file__", None)).startswith(HERE + os.sep):
            del sys.modules[name]

# Before `import torch`: idle OpenMP threads that spin make a step 5 to 30 times slower on busy
# cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Memory pages of 2 MB for large CPU tensors: a tenth of the page faults, and an update of a
# 30 M model takes 4 to 15 % less time.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from harness import flags
from harness.flags import ConfigError, TrainingError, first_line, flag, need, say

# ------------------------------------------------------------------------------------------------
# Config: every field is a flag


@dataclass(init=False)
class Config:
    model: str = flag(
        "", "policy: directory or hub name; empty: the bundled task", group="model and data"
    )
    tokenizer: str = flag("", "directory or hub name; empty: the model's own tokenizer")
    lora_rank: int = flag(0, "rank of adapters on all linear layers but the head; 0: none", low=0)
    train_data: str = flag("", "JSONL, JSON, CSV, parquet, hub name:config:split, file.py:function")
    eval_data: str = flag("", "eval rows, same formats; empty: no eval")
    reward: str = flag(
        "answer",
        "name[:weight],... or file.py:function[:weight]; the first one is the eval accuracy",
    )
    reward_failure: str = flag(
        "zero", "a failed reward or episode counts as 0, or drops its sample", ("zero", "exclude")
    )
    environment: str = flag("", "file.py:name: answers the policy between turns; empty: one turn")
    call_timeout: float = flag(
        10.0, "seconds for one call of a reward or environment from a file", low=1e-6
    )
    workers: int = flag(4, "processes per rank for rewards and environments from files", low=1)
    prompt_template: str = flag(
        "", 'built from columns: "{question}\\nThink first."; empty: the column prompt'
    )
    chat: bool = flag(False, "wrap string prompts as a user turn in the chat template")
    system_prompt: str = flag("", "system message before every prompt; implies --chat")
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
    max_turns: int = flag(8, "turns of the policy in an episode with --environment", low=1)
    max_turn_length: int = flag(
        0, "tokens of one turn; 0: what --max_completion_length leaves", low=0
    )
    temperature: float = flag(1.0, "for sampling and for all log-probabilities", low=1e-6)
    rollout: str = flag(
        "auto", "the sampler; auto: vllm if it is installed, else hf", ("auto", "vllm", "hf")
    )
    vllm_gpu_memory_utilization: float = flag(
        0.3, "share of the GPU's memory that vLLM takes while it samples", low=1e-3, high=1
    )
    max_sampler_gap: float = flag(
        0.0, "stop the run above this mean |log-probability gap| to the sampler; 0: auto", low=0
    )
    tis_cap: float = flag(
        2.0, "cap on each token's weight p_trainer / p_sampler (TIS); 0: off", low=0
    )

    scale_rewards: str = flag(
        "group",
        "whose standard deviation divides r - mean",
        ("group", "batch", "none"),
        group="objective",
    )
    loss_reduction: str = flag(
        "token", "how token losses are averaged", ("token", "sequence", "constant")
    )
    kl_estimator: str = flag("wk3", "KL term of the loss", ("k1", "k2", "k3", "k4", "wk3"))
    kl_in: str = flag("loss", "where the KL penalty goes; reward: k1 only", ("loss", "reward"))
    beta: float = flag(0.0, "KL coefficient; 0: no reference model", low=0)
    clip_low: float = flag(0.2, "the ratio is clipped below 1 - clip_low", low=0, high=1)
    clip_high: float = flag(0.28, "the ratio is clipped above 1 + clip_high", low=0)
    ratio_level: str = flag(
        "token", "policy ratio of each token, or of each sequence (GSPO)", ("token", "sequence")
    )
    mask_truncated: bool = flag(
        False, "drop cut-off completions from the loss (not from the group's mean)"
    )
    non_stop_reward: float | None = flag(
        None, "reward of a completion that was cut off; none: as scored"
    )
    advantage_noise: float = flag(
        0.0, "standard deviation of noise added to the advantages (for a study)", low=0
    )

    num_minibatches: int = flag(1, "optimizer steps per pass over a rollout", low=1, group="update")
    num_epochs: int = flag(1, "passes over a rollout", low=1)
    micro_batch_tokens: int = flag(
        0, "tokens per forward and backward; 0: 2048, on cuda auto-sized", low=0
    )
    learning_rate: float = flag(
        1e-6, "of AdamW on float32 parameters; unless given, ten times this with --lora_rank", low=0
    )
    lr_schedule: str = flag("constant", "after the warmup", ("constant", "linear", "cosine"))
    warmup_steps: int = flag(
        0, "optimizer steps; 0: the first one already has the full learning rate", low=0
    )
    weight_decay: float = flag(0.0, "for matrices; never norms and biases", low=0)
    max_grad_norm: float = flag(1.0, "the gradient's norm is clipped to this; 0: off", low=0)
    max_steps: int = flag(
        100, "rollouts; each has num_minibatches * num_epochs optimizer steps", low=0
    )
    gradient_checkpointing: bool = flag(
        False, "recompute activations in backward: less memory, a third more time"
    )
    fast: bool = flag(
        True, "padding-free rows, tiled head (harness/fast.py); false: plain PyTorch, slower"
    )
    compile: bool = flag(False, "torch.compile each layer: minutes at the start, faster steps")
    dtype: str = flag(
        "auto",
        "for autocast; auto: bfloat16 if fast",
        ("auto", "float32", "bfloat16", "float64"),
    )
    device: str = flag("auto", "auto: cuda, else cpu", ("auto", "cpu", "cuda", "mps"))
    seed: int = flag(0, "every random number is a function of the seed and the step", low=0)

    out_dir: str = flag("out", "directory of the run", group="output")
    eval_every: int = flag(
        10, "steps between evals; 0: only before the first and after the last step", low=0
    )
    eval_samples: int = flag(
        0, "samples per eval prompt at --temperature for pass@k; 0: greedy only", low=0
    )
    save_every: int = flag(
        10, "steps between checkpoints; 0: only after the last step and the best eval", low=0
    )
    keep: int = flag(2, "newest checkpoints kept, besides the best by eval accuracy; 0: all", low=0)
    resume: str = flag(
        "", "continue the run in --out_dir, or start from this checkpoint", bare="latest"
    )
    verbose: bool = flag(False, "show what vLLM and transformers print")
    log_completions: int = flag(
        64, "samples written to completions.jsonl per step; -1: all", low=-1
    )
    log_tokens: int = flag(
        -1,
        "how many of these with per-token data; -1: the group with the largest mean |A|",
        low=-1,
    )
    report_to: str = flag(
        "none", "a dashboard to send metrics to", ("none", "tensorboard", "wandb", "trackio")
    )

    given: dataclasses.InitVar[set | None] = None  # the names of the flags that somebody set

    def __init__(self, given: set | None = None, **values):
        """Config(beta=0.04) sets one flag. dataclasses.replace passes all flags, and the `given`
        of the Config that it copies. Then a flag at its default counts as set only if `given` names
        it."""
        object.__setattr__(self, "given", set(given or ()))
        for f in dataclasses.fields(self):
            object.__setattr__(self, f.name, f.default)
        for name, value in values.items():
            if not hasattr(self, name):
                raise TypeError(f"Config has no flag {name}")
            if given is None or value != getattr(self, name):
                setattr(self, name, value)

    def __setattr__(self, name, value):
        """Notes that somebody set the flag: its value wins over that of the bundled task and over
        that of a resumed run."""
        object.__setattr__(self, name, value)
        self.given.add(name)

    @property
    def longest_turn(self) -> int:
        """The most tokens of one turn of an episode."""
        if self.max_turn_length > 0:
            return self.max_turn_length
        return self.max_completion_length

    @property
    def updates_per_step(self) -> int:
        return self.num_minibatches * self.num_epochs


# The bundled task, "R1 in miniature", used if no --model is given. Given flags win.
BUNDLED = dict(
    model=os.path.join(HERE, "sample_data", "model"),
    train_data=os.path.join(HERE, "sample_data", "train.jsonl"),
    eval_data=os.path.join(HERE, "sample_data", "eval.jsonl"),
    max_completion_length=40,
    learning_rate=3e-4,
    beta=0.001,
    max_steps=20,
    eval_every=5,
)


if __name__ == "__main__":
    # Before the slow import of torch, so that --help and a mistyped flag are answered at once.
    exit_code = flags.exit_code(
        "grpo.py", lambda: flags.parse_flags(Config, None, "grpo.py", __doc__)
    )
    if exit_code != 0:
        sys.exit(exit_code)

import numpy as np
import torch
import transformers
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

from harness import (
    auto,
    check,
    dashboards,
    engine,
    log,
    lora,
    models,
    ranks,
    rows,
    sampler_gap,
)
from harness.arrays import padded, padded_rows, to_device
from harness.chat import decode
from harness.checkpoints import (
    find_checkpoint,
    fingerprint,
    model_writer,
    refuse_other_rank,
    refuse_other_weights,
)
from harness.directory import resumed_flags
from harness.environment import Transcript, load_environment
from harness.hf_sampler import Completion, HFSampler
from harness.log import completion_rows, sample_metrics
from harness.player import Player
from harness.ranks import (
    EVAL,
    MINIBATCHES,
    NOISE,
    PROMPT_ORDER,
    SAMPLING,
    World,
    seed_of,
    stream,
)
from harness.recompute import recomputing
from harness.rows import Prompt
from harness.run import Run
from harness.scorer import Scorer, Scores
from harness.user_code import load_rewards, reward_row, sources

try:
    from harness.fast import FastPolicy
except ModuleNotFoundError as error:
    if error.name != "harness.fast":
        raise
    FastPolicy = None  # everything runs without it, slower

# ------------------------------------------------------------------------------------------------
# Flags: given, saved and default values, and their checks


def validate(cfg: Config) -> None:
    """Raises a ConfigError that names the flag if a value makes no sense. need() raises it if its
    first argument, what must be true, is false."""
    flags.check_flags(cfg)
    models.check_transformers()
    rows.check_template_kwargs(cfg)
    need(cfg.train_data, cfg, "train_data", "required if --model is given")
    samples = cfg.num_prompts * cfg.num_generations
    need(cfg.num_minibatches <= samples, cfg, "num_minibatches", "more than the step's samples")
    if not cfg.environment:
        why = "limits the turns of --environment, which is not given"
        need(cfg.max_turn_length == 0, cfg, "max_turn_length", why)
        need(cfg.max_turns == Config.max_turns, cfg, "max_turns", why)
    why = "more than --max_completion_length, which limits all turns together"
    need(cfg.max_turn_length <= cfg.max_completion_length, cfg, "max_turn_length", why)
    dashboards.check_installed(cfg)
    if cfg.updates_per_step > 1:
        why = "with several updates per rollout, a clip of 0 would act on rounding errors"
        need(cfg.clip_low > 0, cfg, "clip_low", why)
        need(cfg.clip_high > 0, cfg, "clip_high", why)
    if cfg.kl_in == "reward" and cfg.beta > 0:
        why = f"takes --kl_estimator k1 only: {cfg.kl_estimator} has another gradient there"
        need(cfg.kl_estimator == "k1", cfg, "kl_in", why)


def prepare(cfg: Config) -> Config:
    """Completes the flags: given ones first, then the resumed run's, then the bundled task's if no
    model is named. Rejects impossible values before loading anything. To prepare prepared flags
    changes nothing."""
    chosen = resumed_flags(Config, {name: getattr(cfg, name) for name in cfg.given})
    values = {}
    if chosen.get("model", "") == "":
        values.update(BUNDLED)
        if chosen.get("train_data"):
            values["eval_data"] = ""  # the bundled eval is another task
        chosen.pop("model", None)  # an empty --model is the bundled one, too
    values.update(chosen)
    cfg = Config(**values)
    validate(cfg)
    if cfg.lora_rank > 0 and "learning_rate" not in chosen:
        cfg.learning_rate = lora.learning_rate(cfg.learning_rate)
    return cfg


def parse_args(argv=None) -> Config:
    return prepare(Config(**flags.parse_flags(Config, argv, "grpo.py", __doc__)))


def autocast(cfg: Config, device: torch.device):
    """Matrix products in bfloat16, if the run is in bfloat16. A pass with gradients caches no cast
    weights, so that those of recomputed layers need not stay in memory."""
    return torch.autocast(
        device.type,
        torch.bfloat16,
        enabled=cfg.dtype == "bfloat16",
        cache_enabled=not torch.is_grad_enabled(),
    )


# ------------------------------------------------------------------------------------------------
# Model, and the policy: a language model that returns log-probabilities of completion tokens


def without_randomness(config):
    """The model's config, and the configs in it, with every dropout and jitter at 0."""
    for key, value in vars(config).items():
        if hasattr(value, "to_diff_dict"):  # the config of a part, such as the text model
            without_randomness(value)
        elif re.search("dropout|pdrop|layerdrop|jitter", key) and isinstance(value, float):
            setattr(config, key, 0.0)
    return config


def load_model(path: str, cfg: Config):
    """A Hugging Face causal language model with float32 parameters and no randomness:
    two forwards of the same text give the same numbers."""
    # float32 even if the forward runs in bfloat16: at a learning rate of 1e-6, parameters in
    # bfloat16 lose 98 % of the updates to rounding
    dtype = torch.float64 if cfg.dtype == "float64" else torch.float32
    source = f"--model {path}"
    if path != cfg.model:  # a checkpoint
        source = f"--resume {path}"
    try:
        config = without_randomness(transformers.AutoConfig.from_pretrained(path))
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, output_loading_info=True
        )
    except Exception as error:  # broken files raise errors of many types
        raise ConfigError(f"{source}: {first_line(error)}") from None
    if info["missing_keys"]:
        first_missing = min(info["missing_keys"])
        raise ConfigError(f"{source}: its files have no weights for {first_missing}")
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    return model.eval()  # for good: some models draw random numbers in training mode


class Policy(nn.Module):
    """policy(collate(samples, device)) -> (logps [N, T], entropy [N, T] in nats).

    The log-probability of each completion token, and the entropy of the distribution that it was
    drawn from (without a gradient). At padding the values mean nothing. harness/fast.py has a
    faster policy with the same numbers.

    Of the batch it needs: ids [N, L], a text in each row; completion [N, T], the tokens to score;
    before [N, T], the place in the row of the token before each of them; first, the least of these.
    """

    packs = False  # a row holds one text

    def __init__(self, model, temperature: float):
        super().__init__()
        self.model = model
        self.temperature = temperature

    def rows(self, samples) -> dict:
        return padded_rows(samples)

    def forward(self, batch: dict):
        logps = self.logits(batch).log_softmax(-1)  # [N, T, V]
        entropy = torch.special.entr(logps.detach().exp()).sum(-1)  # -sum of p log p
        logps = logps.gather(-1, batch["completion"][:, :, None])  # [N, T, 1]
        return logps[:, :, 0], entropy

    def logits(self, batch: dict):
        """[N, T, V], divided by temperature. The output at one token predicts the next token."""
        L = batch["ids"].shape[1]
        options = {}
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            options["logits_to_keep"] = L - batch["first"]  # skip the prompts' logits
        with recomputing(self.model):
            logits = self.model(input_ids=batch["ids"], use_cache=False, **options).logits
        before = batch["before"] - (L - logits.shape[1])  # [N, T]
        logits = logits.take_along_dim(before[:, :, None], dim=1)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature

    def after_ddp(self, device: torch.device) -> None:
        """Called once DDP has wrapped the policy. FastPolicy then makes a gradient sparse."""


def make_policy(model, cfg: Config, prompts: list[Prompt] = ()):
    """The fastest policy whose log-probs match the plain one's on texts of the run's length."""
    plain = Policy(model, cfg.temperature)
    candidates = [plain]
    if cfg.fast and FastPolicy is not None:
        candidates = [FastPolicy(plain, packs=True), FastPolicy(plain, packs=False), plain]
    return check.first_right(candidates, prompts, cfg)


# ------------------------------------------------------------------------------------------------
# Samples, and the prompts that they answer


@dataclass(eq=False)  # compare by identity: == on arrays gives no single bool
class Sample:
    """One completion: everything after the prompt. Arrays are unpadded, [T] each."""

    group: int  # index of the prompt in the step; a prompt that is drawn twice makes two groups
    prompt: Prompt
    completion_ids: np.ndarray  # int32, with the sampled EOS: the model also learns to stop
    sampler_logps: np.ndarray  # float32, log-probabilities under the sampler
    finish_reason: str  # "stop" or "length"
    text: str = ""
    reward: float = 0.0
    parts: dict = field(default_factory=dict)  # name of a reward function -> its value
    extra: dict = field(default_factory=dict)  # column that a reward function logged -> its value
    # bool: the policy drew the token. False is for tokens that something else wrote, such as a tool
    sampled: np.ndarray = None
    in_loss: np.ndarray = None  # bool: False leaves out a sampled token; others are out anyway
    advantages: np.ndarray = None  # float64
    turn_start: int = 0  # index of the first token of the policy's last turn
    transcript: Transcript | None = None  # what was said in turns; None: no environment
    failure: str = ""  # "cause: message" if the environment failed, which ends the episode
    old_logps: np.ndarray | None = None  # before the first update of the step; None: not needed
    ref_logps: np.ndarray | None = None  # under the reference; None: not needed
    token_notes: dict = field(default_factory=dict)  # name -> [T] floats, for the log: note_tokens

    def __post_init__(self):
        T = len(self.completion_ids)
        if self.sampled is None:
            self.sampled = np.ones(T, bool)
        if self.in_loss is None:
            self.in_loss = np.ones(T, bool)
        if self.advantages is None:
            self.advantages = np.zeros(T)

    def append(self, ids: np.ndarray, logps: np.ndarray, sampled: bool) -> None:
        """Adds a turn of the policy, or tokens that the environment wrote (sampled: False)."""
        if not sampled:
            self.turn_start = len(self.completion_ids) + len(ids)
        self.completion_ids = np.append(self.completion_ids, ids)
        self.sampler_logps = np.append(self.sampler_logps, logps)
        self.sampled = np.append(self.sampled, np.full(len(ids), sampled))
        self.in_loss = np.append(self.in_loss, np.ones(len(ids), bool))
        self.advantages = np.append(self.advantages, np.zeros(len(ids)))

    @property
    def n_tokens(self) -> int:
        return len(self.prompt.ids) + len(self.completion_ids)

    @property
    def n_sampled(self) -> int:
        return int(self.sampled.sum())

    @property
    def trains(self) -> np.ndarray:
        """[T] bool: the loss has a term for the token."""
        return self.sampled & self.in_loss


def prompts_of_step(prompts: list[Prompt], step: int, cfg: Config) -> list[Prompt]:
    """The next num_prompts, in an order reshuffled every epoch. A pure function of
    the seed and the step, so that a resumed run needs no saved position."""
    orders = {}
    chosen = []
    for i in range((step - 1) * cfg.num_prompts, step * cfg.num_prompts):
        epoch, place = divmod(i, len(prompts))
        if epoch not in orders:
            rng = np.random.default_rng(stream(cfg.seed, PROMPT_ORDER, number=epoch))
            orders[epoch] = rng.permutation(len(prompts))
        chosen.append(prompts[orders[epoch][place]])
    return chosen


# ------------------------------------------------------------------------------------------------
# Rollout: token ids in, token ids and log-probabilities out


def checkpoint_weights(model) -> dict:
    """The tensors under their checkpoint names, which vLLM reads: parameters (a tied head once) and
    saved buffers. Without adapters."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    saved = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in saved:
            weights[name] = buffer
    weights = lora.without_adapters(weights)
    # transformers renames and merges some tensors as it loads them, such as those of experts
    return transformers.core_model_loading.revert_weight_conversion(model, weights)


def repack(model) -> None:
    """Packs a tied head and MoE experts again: vLLM's CPU build does it at the start, but not when
    it reloads weights."""
    head = getattr(model, "lm_head", None)
    if hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and module.w2_weight.device.type == "cpu":
            kernel.fused_experts.process_weights_after_loading(module)


def fill_with_nan(model) -> None:
    """Sets all engine weights to NaN before a push.

    On a CPU vLLM also keeps packed copies of some weights, which this does not reach. If such a
    copy is stale, only the metric sampler_gap shows it.
    """
    for parameter in model.parameters():
        parameter.data.fill_(math.nan)
    repack(model)


def has_alibi(model) -> bool:
    """True if the engine's model has ALiBi slopes: tensors that are in no checkpoint."""
    attention = [getattr(module, "impl", None) for module in model.modules()]
    return any(getattr(impl, "alibi_slopes", None) is not None for impl in attention)


class VLLMSampler:
    """A vLLM engine inside the process of each rank; weights are passed in memory."""

    CPU_CACHE_BYTES = 2**30  # for keys and values, on a CPU

    def __init__(self, stop_ids: list[int], longest_prompt: int, cfg: Config, world: World):
        from vllm import LLM, SamplingParams

        self.SamplingParams = SamplingParams
        self.stop_ids = stop_ids
        self.max_completion_length = cfg.max_completion_length
        self.on_cuda = world.device.type == "cuda"
        self.asleep = False
        self.dtype = torch.bfloat16 if cfg.dtype == "bfloat16" else torch.float32
        options = dict(
            model=cfg.model,
            dtype=self.dtype,
            max_model_len=longest_prompt + cfg.max_completion_length,
            seed=cfg.seed,
            skip_tokenizer_init=True,
            generation_config="vllm",
            use_tqdm_on_load=False,
            logprobs_mode="processed_logprobs",  # after the temperature, as the trainer's are
            load_format="dummy",  # the first push sends the weights: skip loading them
        )
        if self.on_cuda:
            options["gpu_memory_utilization"] = cfg.vllm_gpu_memory_utilization
            options["enable_sleep_mode"] = True
        else:
            options["enforce_eager"] = True  # compiling costs seconds and gains nothing here
            options["block_size"] = 32  # only full blocks are cached; the default is 128 tokens
            options["kv_cache_memory_bytes"] = self.CPU_CACHE_BYTES
            options["enable_chunked_prefill"] = False  # crashes if a seeded prompt is split
        if "RANK" in os.environ:  # torchrun has started this process: the engine starts no other
            options["distributed_executor_backend"] = "external_launcher"
        self.llm = LLM(**options)

    def push(self, model):
        """Passes the policy's weights in memory. It first fills the engine's weights with NaN, so
        that one that is missing makes the next rollout fail. Then it loads the weights, packs them
        as the CPU's kernels need them, and clears the cache of prefixes."""
        if self.asleep:  # weights first, then the cache, so that their peaks never add up
            torch.cuda.empty_cache()
            self.wake_up("weights")
        self.llm.apply_model(fill_with_nan)
        weights = lora.merged(checkpoint_weights(model), model, self.dtype)
        self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights))
        self.llm.apply_model(repack)
        if not self.llm.reset_prefix_cache():  # its keys and values are the old policy's
            raise TrainingError("vLLM did not reset its prefix cache after a push of new weights")
        if self.asleep:
            self.wake_up("kv_cache")
            self.asleep = False

    def sleep(self):
        """Frees the GPU for training. Level 2 drops the weights (the next push restores them);
        level 1 keeps a copy, for tensors that no push restores."""
        if self.on_cuda and not self.asleep:
            keep_copy = self.llm.apply_model(has_alibi)[0]  # of the only worker's answers
            self.llm.sleep(level=1 if keep_copy else 2)
            self.asleep = True

    def wake_up(self, tag: str):
        try:
            self.llm.wake_up(tags=[tag])
        except RuntimeError as error:  # what vLLM's allocator raises
            message = f"vLLM cannot wake up its {tag}: {first_line(error)}."
            raise torch.OutOfMemoryError(message) from error

    def close(self):
        self.llm.llm_engine.engine_core.shutdown()

    def generate(
        self,
        prompts: list[np.ndarray],
        n: int,
        seeds: list[int],
        temperature: float,
        limits: list[int] | None = None,
    ) -> list[list[Completion]]:
        """n completions for each prompt of ids; temperature 0 is greedy. limits: most tokens per
        completion, for each prompt. vLLM seeds completion i with seed + i (32 bits on a CPU)."""
        if limits is None:
            limits = [self.max_completion_length] * len(prompts)
        params = [
            self.SamplingParams(
                n=n,
                seed=seed % 2**32,
                temperature=temperature,
                max_tokens=limit,
                stop_token_ids=self.stop_ids,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
            )
            for seed, limit in zip(seeds, limits, strict=True)
        ]
        texts = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        requests = self.llm.generate(texts, params, use_tqdm=engine.shows_progress())
        return [[self.completion(c) for c in request.outputs] for request in requests]

    def completion(self, output) -> Completion:
        flat = output.logprobs  # with logprobs=0 one entry a token: the sampled one
        if flat is None or list(flat.token_ids) != list(output.token_ids):
            raise TrainingError("vLLM returned a token without its log-probability")
        logps = np.array(flat.logprobs, np.float32)
        if not np.isfinite(logps).all() or output.finish_reason not in ("stop", "length"):
            raise TrainingError(
                "vLLM returned non-finite log-probabilities or a broken completion "
                f"({output.finish_reason}): some weights of the engine were not set by the last "
                "push, or the policy itself is not finite"
            )
        return Completion(np.array(output.token_ids, np.int32), logps, output.finish_reason)


def make_sampler(
    kind: str,
    model,
    stop_ids: list[int],  # tokens that end a completion, or a turn of it
    pad_id: int,
    longest_prompt: int,
    cfg: Config,
    world: World,
):
    if kind == "hf":
        return HFSampler(model, stop_ids, pad_id, cfg)
    say("vLLM starts")
    if world.device.type == "cuda":
        say("vLLM compiles, which takes one to three minutes")
    try:
        return VLLMSampler(stop_ids, longest_prompt, cfg, world)
    except Exception as error:
        why = f"vllm did not start: {first_line(error)} (--rollout hf needs no vllm)"
        raise TrainingError(why) from error


def play(samples: list[Sample], sampler, player: Player, temperature: float, cfg: Config) -> None:
    """The turns after the first. What the environment writes between them is context: appended as
    tokens that the policy did not sample, and never in the loss."""
    playing = player.reply(samples)
    while playing:
        texts = [np.append(s.prompt.ids, s.completion_ids) for s in playing]
        seeds = [seed_of(*s.transcript.key, len(s.transcript.turns)) for s in playing]
        room = [cfg.max_completion_length - len(s.completion_ids) for s in playing]
        limits = np.minimum(room, cfg.longest_turn).tolist()
        turns = sampler.generate(texts, 1, seeds, temperature, limits)
        for s, [turn] in zip(playing, turns, strict=True):
            s.append(turn.ids, turn.logps, sampled=True)
            s.finish_reason = turn.finish_reason
        playing = player.reply(playing)  # all turns of a round: the engine gets one large batch


def sample(
    sampler,
    prompts: list[Prompt],
    seeds: list[int],  # one for each prompt
    cfg: Config,
    world: World,
    greedy: bool = False,
    player: Player | None = None,  # of --environment; None: there is one turn
) -> list[Sample]:
    """This rank's share: num_generations samples for every world.size-th prompt, or one greedy."""
    n = 1 if greedy else cfg.num_generations
    temperature = 0.0 if greedy else cfg.temperature
    share = range(world.rank, len(prompts), world.size)
    texts = [prompts[i].ids for i in share]
    limits = [cfg.longest_turn] * len(share)
    groups = sampler.generate(texts, n, [seeds[i] for i in share], temperature, limits)
    samples = []
    keys = []
    for i, completions in zip(share, groups, strict=True):
        for number, c in enumerate(completions):
            samples.append(Sample(i, prompts[i], c.ids, c.logps, c.finish_reason))
            keys.append((seeds[i], number))
    if player is not None:
        player.start(samples, keys)
        play(samples, sampler, player, temperature, cfg)
    return samples


def seeds_of(purpose: int, step: int, n_prompts: int, cfg: Config) -> list[int]:
    """One per prompt, the same for any number of ranks."""
    return [seed_of(*stream(cfg.seed, purpose, step, i)) for i in range(n_prompts)]


def add_texts(samples: list[Sample], tokenizer) -> None:
    """Fills in the texts, for rewards and display only, without the final EOS."""
    for s in samples:
        if s.transcript is None:  # else the player has set the text of the last turn
            ids = s.completion_ids
            if s.finish_reason == "stop":
                ids = ids[:-1]
            s.text = decode(tokenizer, ids)


# ------------------------------------------------------------------------------------------------
# Rewards and advantages


def score(samples: list[Sample], scorer, step: int, cfg: Config) -> Scores:
    """Fills in rewards. A reward is NaN if no reward function applies to the sample, or
    if one failed and --reward_failure is exclude."""
    rows = [reward_row(s, step, cfg) for s in samples]
    failures = [s.failure for s in samples]
    scores = scorer.score([s.text for s in samples], rows, failures)
    for i, s in enumerate(samples):
        s.reward = scores.totals[i]
        s.parts = {name: values[i] for name, values in scores.by_reward.items()}
        s.extra = {name: values[i] for name, values in scores.extra.items()}
        is_cut_off = s.finish_reason == "length" and not math.isnan(s.reward)
        if is_cut_off and cfg.non_stop_reward is not None:
            s.reward = cfg.non_stop_reward
        if scores.failed[i] and cfg.reward_failure == "exclude":
            s.reward = math.nan
    return scores


def group_advantages(rewards, group_size: int, scale: str = "group", eps: float = 1e-4):
    """How much better than the mean of its group each sample did. rewards [N], a group's rows
    consecutive -> [N].

    "group": (r - mean) / (std + eps) (DeepSeekMath, arXiv 2402.03300); std with ddof 1 and eps as
    in TRL. "batch": the same mean, std over the whole step. "none": r - mean (Dr. GRPO, arXiv
    2503.20783). A group of equal rewards gives exactly 0. NaN rewards are ignored and get 0.
    """
    grouped = rewards.double().view(-1, group_size)  # [N / G, G]
    is_number = ~grouped.isnan()
    centred = torch.where(is_number, grouped - grouped.nanmean(1, keepdim=True), 0.0)

    # Rounding error must not become a signal: 0.1 + 0.2 and 0.3 count as the same reward.
    largest = grouped.nan_to_num(0.0).abs().amax(1, keepdim=True)  # [N / G, 1]
    rounding = 4 * torch.finfo(torch.float64).eps * largest
    centred = torch.where(centred.abs().amax(1, keepdim=True) <= rounding, 0.0, centred)

    if scale == "group":
        count = is_number.sum(1, keepdim=True)
        variance = centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)
    elif scale == "batch" and is_number.sum() > 1:
        centred = centred / (grouped[is_number].std() + eps)
    return centred.flatten().to(rewards.dtype)


def assign_advantages(samples: list[Sample], step: int, cfg: Config) -> float:
    """Advantages from the step's full list, so that a group can never be split. Every token gets
    its completion's advantage. Returns the share of groups with equal rewards."""
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)  # [N]
    advantages = group_advantages(rewards, cfg.num_generations, cfg.scale_rewards)
    is_equal = (advantages.view(-1, cfg.num_generations) == 0).all(1)  # [N / G]

    rng = np.random.default_rng(stream(cfg.seed, NOISE, step))
    noise = rng.normal(0.0, cfg.advantage_noise, len(samples))
    for i, s in enumerate(samples):
        T = len(s.completion_ids)
        s.advantages = np.full(T, advantages[i].item() + noise[i])
        is_cut_off = cfg.mask_truncated and s.finish_reason == "length"
        is_excluded = math.isnan(s.reward)
        s.in_loss = np.full(T, not is_cut_off and not is_excluded)
    return is_equal.double().mean().item()


# ------------------------------------------------------------------------------------------------
# Objective


def straight_through(value, x, slope=1.0):
    """Forward: `value`. Backward: the gradient of slope * x, with slope as a constant."""
    return value.detach() + slope * (x - x.detach())


def capped(exponent):
    """The exponent, at most 20, so that products of its exponentials fit float32. Above 20 it keeps
    its gradient, which a plain clamp would lose."""
    return straight_through(exponent.clamp(max=20), exponent)


def kl_estimate(logps, ref_logps, old_logps, estimator: str):
    """Per-token estimates of KL(policy || reference) from samples of the old policy, all [N, T].

    With d = log(policy / reference) and w = policy / old policy: k1 = d, k2 = d^2 / 2,
    k3 = exp(-d) - 1 + d (Schulman, joschu.net/blog/kl-approx.html), k4 = w k1, wk3 = w k3
    (DeepSeek-V3.2, arXiv 2512.02556). As losses, only k2 (on-policy), k4 and wk3 have the gradient
    of the KL. On average, and on-policy, that of k1 is zero, and that of k3 is the gradient of
    KL(reference || policy).
    """
    d = logps - ref_logps
    w = capped(logps - old_logps).exp()
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k4":
        return w * d
    k3 = torch.expm1(capped(-d)) + d
    if estimator == "k3":
        return k3
    # wk3's gradient by logps is w d, because the terms with exp(-d) cancel. Autograd would add them
    # up in float32, and from about d = -20 on their rounding error is as large as d.
    return straight_through(w * k3, logps, slope=(w * d).detach())


def policy_ratio(logps, old_logps, sampled, cfg: Config):
    """policy now / policy before the rollout's first update, for each token: [N, T]. With one
    update per rollout these are the same policy: the ratio is 1, and its gradient is that of the
    log-probability."""
    log_ratio = logps - old_logps  # [N, T]
    if cfg.ratio_level == "sequence":
        # / length: the geometric mean of the token ratios (GSPO, arXiv 2507.18071, eq. 7), with
        # each token's own gradient (GSPO-token, eq. 14). That equals GSPO if all tokens of a
        # sequence share one advantage, and allows for an advantage of each token.
        length = sampled.sum(1, keepdim=True).clamp(min=1)
        mean = log_ratio.sum(1, keepdim=True) / length  # [N, 1]
        log_ratio = straight_through(mean, logps)
    return capped(log_ratio).exp()


def clipped_surrogate(ratio, advantages, cfg: Config):
    """What the policy gains by each token, [N, T] (PPO, arXiv 1707.06347, eq. 7).

    The smaller of two products: a ratio that is beyond the clip in the direction of the advantage
    earns nothing more, and one on the other side counts in full.
    """
    clipped_ratio = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    return torch.minimum(ratio * advantages, clipped_ratio * advantages)


def advantages_less_kl(advantages, old_logps, ref_logps, cfg: Config):
    """The advantages, [N, T]. With --kl_in reward, beta times the KL (by k1) of the token and of
    all later tokens of its sequence is subtracted."""
    if ref_logps is None or cfg.kl_in == "loss":
        return advantages
    k1 = (old_logps - ref_logps).detach()  # [N, T]
    return advantages - cfg.beta * k1.flip(1).cumsum(1).flip(1)  # reverse cumulative sum


def token_loss(
    logps,  # [N, T], as all of these
    old_logps,
    ref_logps,  # None: no KL term
    sampler_logps,  # None: no correction
    advantages,
    sampled,  # True for the tokens that the policy drew; elsewhere all of the above are 0
    cfg: Config,
):
    """The loss of every token before any reduction, [N, T]: clipped surrogate and KL term."""
    advantages = advantages_less_kl(advantages, old_logps, ref_logps, cfg)
    ratio = policy_ratio(logps, old_logps, sampled, cfg)
    surrogate = clipped_surrogate(ratio, advantages, cfg)

    if sampler_logps is not None and cfg.tis_cap > 0:
        # The sampler has the same weights, but other kernels: its probabilities differ a little.
        # Truncated importance sampling corrects that by p_trainer / p_sampler.
        weight = (old_logps - sampler_logps).detach().exp()
        surrogate = surrogate * weight.clamp(max=cfg.tis_cap)

    loss = -surrogate
    if ref_logps is not None and cfg.kl_in == "loss" and cfg.beta > 0:
        loss = loss + cfg.beta * kl_estimate(logps, ref_logps, old_logps, cfg.kl_estimator)
    return loss


@torch.no_grad()
def token_stats(logps, old_logps, ref_logps, advantages, mask, sampled, cfg: Config) -> dict:
    """Sums over the tokens in the loss, for the log."""
    advantages = advantages_less_kl(advantages, old_logps, ref_logps, cfg)
    ratio = policy_ratio(logps, old_logps, sampled, cfg)
    clip_acts = ratio * advantages != clipped_surrogate(ratio, advantages, cfg)
    stats = {"tokens": mask.sum(), "clip_ratio/region_mean": (clip_acts & mask).sum()}
    if ref_logps is not None:
        k3 = kl_estimate(logps, ref_logps, logps, "k3")
        stats["kl"] = torch.where(mask, k3, 0).sum()
        stats["kl_k1"] = torch.where(mask, logps - ref_logps, 0).sum()
    return stats


def grpo_loss(
    logps,  # [N, T]
    old_logps,  # [N, T]
    ref_logps,  # [N, T]; None: no KL term
    sampler_logps,  # [N, T]; None: no correction of the sampler's probabilities
    advantages,  # [N] or [N, T]
    mask,  # [N, T], the tokens in the loss
    cfg: Config,
    n_tokens: int,  # in the loss, over all micro-batches and ranks of the optimizer step
    n_sequences: int,  # likewise
    sampled=None,  # [N, T], the tokens that the policy drew; None: those of mask
):
    """One micro-batch's share of the step's loss: a sum over tokens, divided by GLOBAL counts. The
    sum over any split of the samples is the loss of the whole batch.

    Tokens that are neither sampled nor in the loss are padding or context: they may hold anything,
    even inf or nan. Returns (loss, stats); stats are sums over the tokens in the loss.
    """
    mask = mask.bool()
    sampled = mask if sampled is None else sampled.bool()

    def zero_elsewhere(x):  # before any exp, so that nan reaches neither loss nor gradient
        return torch.where(sampled, x, 0)

    if advantages.dim() == 1:
        advantages = advantages[:, None]
    advantages = zero_elsewhere(advantages.to(logps.dtype).expand_as(logps))
    logps = zero_elsewhere(logps)
    old_logps = zero_elsewhere(old_logps)
    if ref_logps is not None:
        ref_logps = zero_elsewhere(ref_logps)
    if sampler_logps is not None:
        sampler_logps = zero_elsewhere(sampler_logps)
    per_token = token_loss(logps, old_logps, ref_logps, sampler_logps, advantages, sampled, cfg)

    if cfg.loss_reduction == "token":
        weight = 1 / n_tokens  # every token of the step counts the same (DAPO, arXiv 2503.14476)
    elif cfg.loss_reduction == "sequence":
        length = mask.sum(1, keepdim=True).clamp(min=1)  # [N, 1]
        # / length: every completion counts the same, at any length (GRPO)
        weight = 1 / (length * n_sequences).to(logps.dtype)
    else:
        # / a constant, so that length has no influence (Dr. GRPO)
        weight = 1 / (n_sequences * cfg.max_completion_length)
    loss = torch.where(mask, per_token * weight, 0).sum()
    return loss, token_stats(logps, old_logps, ref_logps, advantages, mask, sampled, cfg)


# ------------------------------------------------------------------------------------------------
# Update: deal samples to ranks, micro-batches, backward, one optimizer step per mini-batch


def micro_batches(share: list[tuple[Sample, int]], packs: bool, budget: int) -> list[list[Sample]]:
    """Fills one micro-batch after the other. cost: the sample's tokens that a packed row does not
    have yet. The row leaves out the last token of a text, because no later token needs it."""
    batches = []
    tokens = 0  # of the last micro-batch
    width = 0  # of its padded rows: that of the first sample, which is the longest
    for s, cost in share:
        if packs:
            alone, added = s.n_tokens - 1, cost - 1
        else:
            alone, added = s.n_tokens, width
        if not batches or tokens + added > budget:
            batches.append([s])
            tokens = width = alone
        else:
            batches[-1].append(s)
            tokens += added
    return batches


def plan(samples: list[Sample], packs: bool, cfg: Config, n_ranks: int) -> list:
    """Each rank's micro-batches: lists of samples with at most micro_batch_tokens tokens. All
    ranks get nearly equal token counts, so that they finish together.

    Packed rows hold a group's prompt once, so groups stay together; padded rows are as wide as
    their longest sample, so samples are sorted by length. Either way the longest come first.
    """
    if packs:
        longest = {}  # group -> tokens of its longest completion
        for s in samples:
            longest[s.group] = max(longest.get(s.group, 0), len(s.completion_ids))
        samples = sorted(samples, key=lambda s: (-longest[s.group], s.group))
    else:
        samples = sorted(samples, key=lambda s: -s.n_tokens)

    # Tokens that each sample adds to a row: a prompt already in the row is not repeated.
    costs = []
    for i, s in enumerate(samples):
        has_prompt = packs and i > 0 and samples[i - 1].group == s.group
        costs.append(len(s.completion_ids) if has_prompt else s.n_tokens)

    # Cut all tokens into equal shares: a sample goes to the rank that has its middle.
    shares = [[] for _ in range(n_ranks)]
    total = sum(costs)
    start = 0
    for s, cost in zip(samples, costs, strict=True):
        rank = int((start + cost / 2) * n_ranks // total)
        shares[rank].append((s, cost))
        start += cost
    return [micro_batches(share, packs, cfg.micro_batch_tokens) for share in shares]


def collate(samples: list[Sample], device: torch.device, rows=padded_rows) -> dict:
    """The tensors of one micro-batch: token rows as made by the policy's `rows`, and the inputs of
    the loss. All indices are made on the CPU, so no pass waits for the GPU."""
    batch = rows(samples)
    batch["mask"] = padded([s.trains for s in samples], bool)  # [N, T]
    batch["sampled"] = padded([s.sampled for s in samples], bool)  # [N, T]
    batch["advantages"] = padded([s.advantages for s in samples], np.float64)  # [N, T]
    for name in ("sampler_logps", "old_logps", "ref_logps"):
        values = [getattr(s, name) for s in samples]
        missing = sum(x is None for x in values)
        if missing == 0:
            batch[name] = padded(values, values[0].dtype)  # [N, T]
        elif missing < len(samples):
            raise ValueError(
                f"{missing} of {len(samples)} samples have no {name}: all must, or none"
            )
    return to_device(batch, device)


@torch.no_grad()
def compute_logps(
    policy,
    samples: list[Sample],
    name: str,  # the field of Sample that holds them
    cfg: Config,
    world: World,
) -> None:
    """Log-probabilities of the samples under `policy`: each rank computes a share, and then every
    rank stores all of them."""
    index = {s: i for i, s in enumerate(samples)}
    results = []
    for micro_batch in plan(samples, policy.packs, cfg, world.size)[world.rank]:
        with autocast(cfg, world.device):
            logps, _ = policy(collate(micro_batch, world.device, policy.rows))  # [N, T]
        for s, row in zip(micro_batch, logps.cpu().numpy(), strict=True):
            results.append((index[s], row[: len(s.completion_ids)]))
    for i, row in world.gather(results):
        setattr(samples[i], name, row)


def minibatches(samples: list[Sample], step: int, cfg: Config):
    """num_epochs passes over the samples, each in num_minibatches parts of nearly equal size."""
    for epoch in range(cfg.num_epochs):
        rng = np.random.default_rng(stream(cfg.seed, MINIBATCHES, step, epoch))
        order = rng.permutation(len(samples))
        for part in np.array_split(order, cfg.num_minibatches):
            yield [samples[i] for i in part]


def learning_rate_at(update: int, cfg: Config) -> float:
    """The learning rate of optimizer step `update` (from 0). A pure function, so that a resumed
    run has no schedule to restore."""
    total = cfg.max_steps * cfg.updates_per_step
    if update < cfg.warmup_steps:
        return cfg.learning_rate * (update + 1) / cfg.warmup_steps
    progress = (update - cfg.warmup_steps) / max(1, total - cfg.warmup_steps)  # in [0, 1)
    if cfg.lr_schedule == "linear":
        return cfg.learning_rate * (1 - progress)
    if cfg.lr_schedule == "cosine":
        return cfg.learning_rate * (1 + math.cos(math.pi * progress)) / 2
    return cfg.learning_rate


def make_optimizer(policy, cfg: Config):
    parameters = [p for p in policy.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.dim() >= 2]
    vectors = [p for p in parameters if p.dim() < 2]
    groups = [dict(params=matrices, weight_decay=cfg.weight_decay)]
    if vectors:
        groups.append(dict(params=vectors, weight_decay=0.0))
    # fused: one pass over parameters and moments, not a dozen: 5 times as fast on a CPU
    return torch.optim.AdamW(groups, lr=cfg.learning_rate, fused=True)


NO_GRADIENT = ("left_out", "nothing_sampled", "no_advantage", "at_reference")


def why_no_gradient(sample: Sample, cfg: Config, at_reference: bool = False) -> str:
    """One of NO_GRADIENT if the loss has no gradient in any token of this sample, else ""."""
    if not sample.in_loss.any():
        return "left_out"
    if not sample.trains.any():
        return "nothing_sampled"
    if sample.advantages[sample.trains].any():
        return ""
    if cfg.beta == 0:
        return "no_advantage"
    if at_reference:  # the KL's gradient is rounding error; Adam would make it a full step
        return "at_reference"
    return ""


def loss_counts(samples: list[Sample]) -> tuple[int, int]:
    """The tokens and the sequences in the loss, at least 1: the reductions divide by them."""
    n_tokens = sum(int(s.trains.sum()) for s in samples)
    n_sequences = sum(bool(s.in_loss.any()) for s in samples)
    return max(1, n_tokens), max(1, n_sequences)


def batch_loss(logps, batch: dict, cfg: Config, n_tokens: int, n_sequences: int) -> tuple:
    """grpo_loss of one micro-batch, and its sums for the log."""
    if "old_logps" in batch:  # several updates per rollout: the policy before the first of them
        old_logps = batch["old_logps"]
    else:  # one update per rollout: the policy before it is this one, and the ratio is 1
        old_logps = logps.detach()
    loss, stats = grpo_loss(
        logps,
        old_logps,
        batch.get("ref_logps"),
        batch["sampler_logps"],
        batch["advantages"],
        batch["mask"],
        cfg,
        n_tokens,
        n_sequences,
        sampled=batch["sampled"],
    )
    gap = sampler_gap.sampler_stats(old_logps, batch["sampler_logps"], batch["mask"], cfg)
    stats.update(gap)
    return loss, stats


def add_up(parts: list[dict]) -> dict:
    """The sum of each name's values, over parts of a step. Means of parts could not be averaged,
    since parts differ in size. For a name that ends in _max: the maximum."""
    totals = {}
    for part in parts:
        for name, value in part.items():
            if name not in totals:
                totals[name] = value
            elif name.endswith("_max"):
                totals[name] = max(totals[name], value)
            else:
                totals[name] = totals[name] + value
    return totals


def backward(policy, ddp, minibatch: list[Sample], cfg: Config, world: World) -> dict:
    """The gradient of one optimizer step, in micro-batches. Returns this rank's sums."""
    n_tokens, n_sequences = loss_counts(minibatch)
    trained = [s for s in minibatch if not why_no_gradient(s, cfg)]  # the others need no pass
    shares = plan(trained, policy.packs, cfg, world.size)
    share = shares[world.rank]

    # DDP needs the same number of forwards and backwards on every rank, and at least one. A rank
    # with fewer micro-batches adds idle rounds: a sample with all tokens masked.
    n_rounds = max(1, *[len(share) for share in shares])
    spare = trained[:1]
    if not trained:
        spare = minibatch[:1]
    idle_rounds = [spare] * (n_rounds - len(share))

    all_stats = []  # they stay on the device until the last micro-batch: no pass waits for them
    for i, micro_batch in enumerate(share + idle_rounds):
        batch = collate(micro_batch, world.device, policy.rows)
        if i >= len(share):  # an idle round
            batch["mask"].zero_()
        # DDP averages gradients over the ranks in the last backward only.
        ddp.require_backward_grad_sync = i == n_rounds - 1
        with autocast(cfg, world.device):
            logps, entropy = ddp(batch)  # [N, T]
        loss, stats = batch_loss(logps, batch, cfg, n_tokens, n_sequences)
        # * ranks, because DDP averages, and the loss is already divided by global counts
        (loss * world.size).backward()
        stats["loss"] = loss.detach()
        stats["entropy"] = torch.where(batch["mask"], entropy, 0).sum()
        all_stats.append(stats)

    names = list(stats)  # the same in every micro-batch
    table = torch.stack([torch.stack(list(stats.values())) for stats in all_stats])
    values = table.tolist()  # [micro-batches, names], one device sync
    return add_up([dict(zip(names, row, strict=True)) for row in values])


def why_no_step(norm: float, minibatch: list[Sample], cfg: Config, at_reference: bool) -> str:
    """Why the optimizer must not step; "" if it may. Equal on all ranks, like the norm."""
    if not math.isfinite(norm):
        return "not_finite"
    causes = [why_no_gradient(s, cfg, at_reference) for s in minibatch]
    if all(causes):  # only momentum would move the weights
        return max(NO_GRADIENT, key=causes.count)  # the most frequent one
    return ""


def update_metrics(totals: dict, norms: list[float], outcomes: list[str]) -> dict:
    """totals: sums over all tokens of the step; norms and outcomes: of each optimizer step."""
    metrics = {
        "loss": totals["loss"] / len(norms),
        "grad_norm": float(np.mean(norms)),
        "optimizer_steps": outcomes.count(""),
        "skipped_steps": outcomes.count("not_finite"),
    }
    for name in ("entropy", "clip_ratio/region_mean", "kl", "kl_k1"):
        if name in totals and totals["tokens"] > 0:  # else there is nothing to average
            metrics[name] = totals[name] / totals["tokens"]
    for cause in ("not_finite", *NO_GRADIENT):
        metrics[f"skipped_steps/{cause}"] = outcomes.count(cause)
    return metrics


def update(
    policy,
    optimizer,
    samples: list[Sample],  # of the whole step, on every rank
    cfg: Config,
    *,
    step: int = 1,
    ddp=None,  # the policy as DistributedDataParallel wraps it
    world: World | None = None,  # None: one process
    at_reference: bool = False,  # the policy still has the reference's weights
) -> dict:
    """All optimizer steps of one rollout; returns metrics."""
    if ddp is None:
        ddp = policy
    if world is None:
        world = World(0, 1, policy.model.device)
    # DDP keeps gradients in buckets: freeing .grad would make a second copy.
    free_gradients = world.size == 1
    all_sums = []  # for the log, of each optimizer step
    norms = []
    sampler_metrics = {}
    outcomes = []  # of each optimizer step: "" if it was taken, else why not

    for number, minibatch in enumerate(minibatches(samples, step, cfg)):
        learning_rate = learning_rate_at((step - 1) * cfg.updates_per_step + number, cfg)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.zero_grad(set_to_none=free_gradients)
        sums = add_up(world.gather([backward(policy, ddp, minibatch, cfg, world)]))
        if not sampler_metrics and sums["tokens"] > 0:
            # This raises, before any weight changes, if the sampler is too far off.
            sampler_metrics = sampler_gap.sampler_metrics(sums, cfg)
        all_sums.append(sums)

        max_norm = cfg.max_grad_norm if cfg.max_grad_norm > 0 else math.inf
        norm = nn.utils.clip_grad_norm_(policy.parameters(), max_norm).item()  # before clipping
        norms.append(norm)
        outcome = why_no_step(norm, minibatch, cfg, at_reference)
        outcomes.append(outcome)
        if outcome == "":
            optimizer.step()
            at_reference = False
    optimizer.zero_grad(set_to_none=free_gradients)

    metrics = update_metrics(add_up(all_sums), norms, outcomes)
    metrics["learning_rate"] = learning_rate
    metrics["frac_no_gradient"] = np.mean([why_no_gradient(s, cfg) != "" for s in samples]).item()
    metrics.update(sampler_metrics)
    return metrics


def note_tokens(policy, samples: list[Sample], cfg: Config, world: World) -> None:
    """Fills in `token_notes` of a few samples, for the log. It needs a forward pass of its own,
    before the update. For each token:

    logp, entropy: under the policy, in nats
    gap: logp less the sampler's log-probability
    kl: logp less the reference's, which is k1
    push: -dloss/dlogp times the step's number of tokens: how strongly the update makes the token
        more likely, on the scale of an advantage
    """
    n_tokens, n_sequences = loss_counts(samples)
    [share] = plan(log.samples_to_note(samples, cfg), policy.packs, cfg, n_ranks=1)
    for micro_batch in share:
        batch = collate(micro_batch, world.device, policy.rows)
        with torch.no_grad(), autocast(cfg, world.device):
            logps, entropy = policy(batch)  # [N, T]
        leaf = logps.clone().requires_grad_()  # gradient by logps only
        loss, _ = batch_loss(leaf, batch, cfg, n_tokens, n_sequences)
        slope = torch.autograd.grad(loss, leaf)[0]
        notes = {
            "logp": logps,
            "entropy": entropy,
            "gap": logps - batch["sampler_logps"],
            "push": -slope * n_tokens,
        }
        if "ref_logps" in batch:
            notes["kl"] = logps - batch["ref_logps"]
        for name, values in notes.items():
            values = torch.where(batch["mask"], values, 0).cpu().numpy()
            for s, row in zip(micro_batch, values, strict=True):
                s.token_notes[name] = row[: len(s.completion_ids)]


# ------------------------------------------------------------------------------------------------
# Eval


def eval_rewards(
    sampler,
    prompts: list[Prompt],
    tokenizer,
    scorer,
    player: Player | None,
    step: int,
    cfg: Config,
    world: World,
    greedy: bool,
) -> tuple:
    """The first reward of each sample [prompts, samples], and the mean length, over all ranks."""
    seeds = seeds_of(EVAL, step, len(prompts), cfg)
    samples = sample(sampler, prompts, seeds, cfg, world, greedy, player)
    add_texts(samples, tokenizer)
    scores = world.gather([score(samples, scorer, step, cfg)])
    failures = [s.first_failure for s in scores if s.first_failure]
    if failures:
        say(f"eval of step {step}: {failures[0]}")
    first_reward = next(iter(scores[0].by_reward))
    results = world.gather([(s.group, s.parts[first_reward], s.n_sampled) for s in samples])
    results.sort(key=lambda result: result[0])  # by prompt
    values = np.array([value for _, value, _ in results]).reshape(len(prompts), -1)
    return values, float(np.mean([length for _, _, length in results]))


def evaluate(
    sampler,
    prompts: list[Prompt],
    tokenizer,
    scorer,
    step: int,
    cfg: Config,
    world: World,
    player: Player | None = None,
) -> dict:
    """Greedy accuracy (the first reward) on held-out prompts, and pass@k with --eval_samples."""
    task = (sampler, prompts, tokenizer, scorer, player, step)
    values, length = eval_rewards(*task, cfg, world, greedy=True)
    values = values[~np.isnan(values)]  # a reward is NaN for rows to which it does not apply
    metrics = {"eval_accuracy": math.nan, "eval_stderr": 0.0, "eval_length": length}
    if len(values) > 0:
        metrics["eval_accuracy"] = float(values.mean())
    if len(values) > 1:
        metrics["eval_stderr"] = float(values.std(ddof=1)) / math.sqrt(len(values))

    k = cfg.eval_samples
    if k > 0:
        cfg = dataclasses.replace(cfg, num_generations=k)
        values, _ = eval_rewards(*task, cfg, world, greedy=False)
        values = values[~np.isnan(values).any(1)]  # [prompts, k]
        if len(values) > 0:
            metrics["eval_pass@1"] = float((values > 0.5).mean())
            metrics[f"eval_pass@{k}"] = float((values > 0.5).any(1).mean())
    return metrics


# ------------------------------------------------------------------------------------------------
# Train


def wrap(policy, cfg: Config, world: World):
    """Wraps the policy in DistributedDataParallel if there are several ranks. Call it after vLLM
    has started: vLLM needs free memory, and it may switch this thread to another CUDA stream, of
    which a DDP that exists already would not know."""
    ddp = policy
    if cfg.compile:
        models.compile_layers(policy.model, cfg)
    if world.size > 1:
        device_ids = [world.device.index] if world.device.type == "cuda" else None
        ddp = DistributedDataParallel(policy, device_ids=device_ids, gradient_as_bucket_view=True)
    policy.after_ddp(world.device)
    return ddp


def load_reference(
    cfg: Config, device: torch.device, identity: int | None, prompts: list[Prompt] = ()
):
    """The frozen policy that the KL is measured from. identity: the fingerprint of the weights at
    the start of the run; None: any."""
    model = load_model(cfg.model, cfg).to(device).requires_grad_(False)
    if identity is not None:
        why = "so its KL would be measured from another reference; give those, or take --beta 0"
        refuse_other_weights(fingerprint(model), identity, cfg, why)
    reference = make_policy(model, cfg, prompts)  # before the cast: its check runs without autocast
    if cfg.dtype == "bfloat16":
        models.halve_frozen(model)
    return reference


def load_trained_model(cfg: Config, checkpoint, device: torch.device) -> tuple:
    """The model that the run trains, and the fingerprint of its weights at the start of the run.
    With --lora_rank these are the frozen weights of --model, also when a run is resumed."""
    if checkpoint:
        refuse_other_rank(checkpoint, cfg)
    if checkpoint and cfg.lora_rank == 0:
        model = load_model(checkpoint.path, cfg).to(device)
        return model, checkpoint.state["identity"]

    model = load_model(cfg.model, cfg).to(device)
    identity = fingerprint(model)
    if cfg.lora_rank > 0:
        lora.add_adapters(model, cfg)
    if checkpoint:
        start = checkpoint.state["identity"]
        refuse_other_weights(identity, start, cfg, "and to which its adapters belong")
        lora.load_adapters(model, checkpoint.path)
    return model, identity


def load_policies(cfg: Config, checkpoint, prompts: list[Prompt], device: torch.device) -> tuple:
    """The flags with every `auto` resolved; the policy, from the checkpoint or --model; the
    reference or None; the fingerprint of the weights at the start of the run."""
    model, identity = load_trained_model(cfg, checkpoint, device)
    models.check_sizes(model, prompts, cfg)
    longest_prompt = max(len(p.ids) for p in prompts)
    # DDP would wait for the gradients of parameters that no text reaches.
    models.freeze_unused(model, longest_prompt + cfg.max_completion_length)
    auto.set_threads(model)
    cfg = auto.resolve_auto(cfg, model, device)
    policy = make_policy(model, cfg, prompts)  # before the cast: its check runs without autocast
    if cfg.lora_rank > 0 and cfg.dtype == "bfloat16":
        models.halve_frozen(model)
        lora.add_before_rounding(model)  # else bfloat16 would round a small adapter's share away
    reference = None
    if cfg.beta > 0 and cfg.lora_rank > 0:
        reference = lora.BasePolicy(policy)
    elif cfg.beta > 0:
        reference = load_reference(cfg, device, identity, prompts)
    return cfg, policy, reference, identity


def load_data(cfg: Config) -> tuple:
    """Rewards, environment or None, tokenizer, train prompts and eval prompts."""
    try:
        rewards = load_rewards(cfg.reward)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"--reward {cfg.reward}: {error}") from None
    environment = load_environment(cfg.environment, rewards)
    tokenizer = rows.load_tokenizer(cfg)
    train_prompts = rows.load_prompts("train_data", rewards, tokenizer, cfg, environment)
    eval_prompts = []
    if cfg.eval_data:
        eval_prompts = rows.load_prompts("eval_data", rewards, tokenizer, cfg, environment)
    return rewards, environment, tokenizer, train_prompts, eval_prompts


def refuse_other_ranks(world: World, cfg: Config, inputs: dict, rewards, identity: int) -> None:
    """ConfigError if the ranks hold different flags, rows, reward functions or weights. Paths may
    differ between machines: their contents are compared."""
    values = {f"--{name}": value for name, value in dataclasses.asdict(cfg).items()}
    for path in ("--tokenizer", "--out_dir", "--resume"):
        del values[path]
    values["--model"] = identity
    values["--train_data"] = inputs["train_rows"]
    values["--eval_data"] = inputs["eval_rows"]
    code = sorted(inputs["reward_code"].values())
    # The path of the environment's file may differ; `code` has its contents.
    values["--environment"] = cfg.environment.rpartition(":")[2]
    values["--reward"] = [(reward.name, reward.weight) for reward in rewards] + code
    world.same(values)


def agree_on_packing(policies: list, world: World) -> None:
    """Packs rows only if every rank can: each rank plans the micro-batches of all ranks."""
    packs = all(world.gather([p.packs for p in policies]))
    for p in policies:
        p.packs = packs


@contextlib.contextmanager
def set_up(cfg: Config, command_line: bool):
    """Setup before the first step, and teardown. Every rank checks flags and files before anything
    is written."""
    started = time.monotonic()
    cfg = prepare(cfg)
    device = ranks.pick_device(cfg.device, cfg.dtype)
    models.keep_freed_memory(device)
    models.quiet_transformers(cfg.verbose)
    rewards, environment, tokenizer, train_prompts, eval_prompts = load_data(cfg)
    prompts = train_prompts + eval_prompts
    checkpoint = find_checkpoint(cfg)  # None: from the beginning
    cfg, policy, reference, identity = load_policies(cfg, checkpoint, prompts, device)
    eos_ids, pad_id = models.special_ids(policy.model, tokenizer, cfg)
    sampler_kind, why_this_sampler = engine.choose_sampler(cfg, device, auto.is_small(policy.model))
    scorer = Scorer(rewards, cfg.call_timeout, cfg.workers, environment=environment)
    stop_ids = eos_ids  # they end a turn of the policy
    player = None
    if environment is not None:
        player = Player(environment, scorer.pool, tokenizer, eos_ids, prompts, cfg)
        stop_ids = player.stop_ids

    world = ranks.join_world(device)
    inputs = dict(
        train_rows=rows.fingerprint_of_data(train_prompts),
        eval_rows=rows.fingerprint_of_data(eval_prompts),
        reward_code=sources([*rewards, environment]),
    )
    refuse_other_ranks(world, cfg, inputs, rewards, identity)
    with Run(cfg, world, checkpoint, started, command_line, inputs) as run:
        cfg = run.cfg  # with the run's own directory
        policies = [policy, reference] if reference else [policy]
        agree_on_packing(policies, world)
        longest_prompt = max(len(p.ids) for p in prompts)
        sampler = make_sampler(
            sampler_kind, policy.model, stop_ids, pad_id, longest_prompt, cfg, world
        )
        run.exits.callback(sampler.close)
        run.exits.callback(scorer.close)
        optimizer = make_optimizer(policy, cfg)
        source = checkpoint.path if checkpoint else cfg.model
        run.track(policy.model, optimizer, model_writer(policy.model, tokenizer, source), identity)
        counts = f"{len(train_prompts)} train and {len(eval_prompts)} eval prompts"
        defaults = Config()  # the run prints only the flags that differ from them
        run.introduce(defaults, f"{counts}, rollouts by {sampler_kind} ({why_this_sampler})")
        say(
            "watch reward, eval accuracy, grad and no-signal, not the loss: it can be 0 or rise "
            "while the model learns, since only its gradient has a meaning (learn.ipynb, 1 and 9)"
        )
        yield SimpleNamespace(
            cfg=cfg,
            run=run,
            world=world,
            policy=policy,
            reference=reference,
            optimizer=optimizer,
            sampler=sampler,
            scorer=scorer,
            player=player,
            tokenizer=tokenizer,
            train_prompts=train_prompts,
            eval_prompts=eval_prompts,
        )


def push_and_evaluate(parts, step: int) -> None:
    """Pushes the weights after `step` to the sampler; evaluates if that is due."""
    with parts.run.clock("sync"):
        parts.sampler.push(parts.policy.model)
    if parts.run.eval_due(step):
        metrics = evaluate(
            parts.sampler,
            parts.eval_prompts,
            parts.tokenizer,
            parts.scorer,
            step,
            parts.cfg,
            parts.world,
            parts.player,
        )
        parts.run.record_eval(step, metrics)


@models.exact_float32()
@torch.inference_mode(False)  # whatever mode the caller is in
@torch.enable_grad()
def train(cfg: Config, command_line: bool = False) -> list[dict]:
    """The whole run; returns the lines of metrics.jsonl. command_line: a signal ends the process.
    Otherwise it raises KeyboardInterrupt."""
    if cfg.show_prompt:
        _, _, _, train_prompts, _ = load_data(prepare(cfg))
        say(f"{train_prompts[0].text}\n{train_prompts[0].ids.tolist()}")
        return []
    with set_up(cfg, command_line) as parts:
        cfg, world, run = parts.cfg, parts.world, parts.run
        policy, reference, tokenizer = parts.policy, parts.reference, parts.tokenizer
        ddp = wrap(policy, cfg, world)
        at_reference = reference is not None and models.same_weights(policy.model, reference.model)
        push_and_evaluate(parts, run.start_step)

        for step in run.steps():  # and saves after a step, if that is due
            with run.clock("rollout"):
                prompts = prompts_of_step(parts.train_prompts, step, cfg)
                seeds = seeds_of(SAMPLING, step, len(prompts), cfg)
                samples = sample(parts.sampler, prompts, seeds, cfg, world, player=parts.player)
                parts.sampler.sleep()
            with run.clock("reward"):
                add_texts(samples, tokenizer)
                scores = world.gather([score(samples, parts.scorer, step, cfg)])
                samples = sorted(world.gather(samples), key=lambda s: s.group)  # all on all ranks
            failures = parts.scorer.failure_metrics(scores, step, len(samples))
            frac_zero_std = assign_advantages(samples, step, cfg)

            with run.clock("logps"):
                kept = [s for s in samples if s.in_loss.any()]
                if cfg.updates_per_step > 1:
                    compute_logps(policy, kept, "old_logps", cfg, world)
                if reference:
                    compute_logps(reference, kept, "ref_logps", cfg, world)
                note_tokens(policy, samples, cfg, world)
            with run.clock("update"):
                metrics = update(
                    policy,
                    parts.optimizer,
                    samples,
                    cfg,
                    step=step,
                    ddp=ddp,
                    world=world,
                    at_reference=at_reference,
                )
                if metrics["optimizer_steps"] > 0:
                    at_reference = False

            metrics["frac_reward_zero_std"] = frac_zero_std
            metrics.update(sample_metrics(samples))
            metrics.update(failures)
            run.record(step, metrics, completion_rows(samples, step, tokenizer))
            push_and_evaluate(parts, step)
        del ddp  # before vLLM is closed, which may end the process group that DDP needs
    return run.log.history


@record  # torchrun's report then names the rank that failed first, and why
def main() -> int:
    less_memory = (
        "lower --micro_batch_tokens or --vllm_gpu_memory_utilization, or take "
        "--gradient_checkpointing or --beta 0"
    )
    return flags.exit_code("grpo.py", lambda: train(parse_args(), command_line=True), less_memory)


if __name__ == "__main__":
    sys.exit(main())
