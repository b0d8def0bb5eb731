"""Help for the tests of episodes: tokenizers of three kinds with a chat template for tools, a
sampler that follows a script, and players whose environment answers in this process."""

import json
import os
import pickle
import types

import numpy as np
import transformers

import grpo
import harness.environment
from grpo import Config, Sample
from harness import rows
from harness.chat import encode, protect
from harness.environment import Transcript, load_environment
from harness.hf_sampler import Completion
from harness.jobs import load
from harness.player import Player
from harness.scorer import Scorer
from harness.user_code import load_rewards
from harness.workers import outcome_of
from tests.common import CPU, HERE, ids_of
from tests.families import bytes_tokenizer

FILE = os.path.join(HERE, "tests", "environments.py")
WORDS = ("<unk>", "<|im_start|>", "<|im_end|>")

# As Qwen 2.5 and SmolLM write tools, calls and results.
CHAT = """{%- if tools %}{{ '<|im_start|>system\n' }}
    {%- for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>tool\n' + message.content + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def chat_tokenizer(kind: str = "bytes"):
    """bytes: byte-level BPE. merges: the same, where a hint that begins with "=" would merge with
    the "=" before it. legacy, always, first, unigram: sentencepiece, which puts a blank before the
    text, or before every text that follows a control token."""
    if kind == "bytes":
        backend = bytes_tokenizer(WORDS, (), None)
    elif kind == "merges":
        backend = merging_tokenizer()
    else:
        backend = pieces_with_blank(kind)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def merging_tokenizer():
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    merges = [("=", "="), ("Ċ", "Ċ"), ("=", "5"), ("5", "5")]
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges), *WORDS]
    ids = {word: i for i, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in WORDS])
    return tokenizer


def pieces_with_blank(kind):
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    letters = "▁\nABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+-=.,:;?!<>|_/\"{}'"
    pieces = ("▁t", "▁th", "\n\n", "==", "11")
    vocabulary = [*WORDS, *(f"<0x{i:02X}>" for i in range(256)), *letters, *pieces]
    ids = {word: i for i, word in enumerate(vocabulary)}
    if kind == "unigram":
        scores = [(word, -2.0 if word in letters else -3.0) for word in vocabulary]
        tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    else:
        merges = [("▁", "t"), ("▁t", "h"), ("\n", "\n"), ("=", "="), ("1", "1")]
        options = dict(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, **options))
    if kind == "legacy":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    else:
        scheme = "first" if kind == "first" else "always"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in WORDS])
    return tokenizer


def ids_in(text, tokenizer):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def call_text(name, **arguments):
    return f"<tool_call>{json.dumps(dict(name=name, arguments=arguments))}</tool_call>"


class Script:
    """A sampler whose turns are given: rounds of texts (the EOS is added) or of ids. A request of
    several completions takes as many from its round. It keeps what it was asked."""

    def __init__(self, tokenizer, *rounds):
        self.tokenizer = tokenizer
        self.rounds = list(rounds)
        self.prompts = []  # of each round: [P] of each request
        self.limits = []

    def generate(self, prompts, n, seeds, temperature, limits):
        turns = iter(self.rounds[len(self.prompts)])
        self.prompts.append([prompt.tolist() for prompt in prompts])
        self.limits.append(limits)
        return [[self.completion(next(turns), limit) for _ in range(n)] for limit in limits]

    def ids_of(self, turn):
        if not isinstance(turn, str):
            return turn
        words = encode(protect(turn, self.tokenizer), self.tokenizer)
        return [*words, self.tokenizer.eos_token_id]

    def completion(self, turn, limit):
        ids = self.ids_of(turn)
        reason = "stop" if len(ids) <= limit else "length"
        ids = ids_of(ids[:limit])
        return Completion(ids, np.full(len(ids), -1, np.float32), reason)


class Inline:
    """Takes the place of a pool of workers: calls in this process, with copies, as a pipe has."""

    def __init__(self, environment, rewards=()):
        files = [(r.name, r.path, r.text) for r in rewards if not r.trusted]
        place = (environment.name, environment.path, environment.text)
        self.functions = load(files, place)
        self.jobs = []
        harness.environment.objects.clear()  # of another test's episodes

    def worker_of(self, place):
        return 0

    def call_all(self, jobs, places=None):
        self.jobs += jobs
        outcomes = []
        for job in jobs:
            name, *arguments = pickle.loads(pickle.dumps(job))
            outcomes.append(outcome_of(self.functions[name], *arguments))
        return outcomes


def stage(name, table, tokenizer=None, pool=None, **flags):
    """What an episode needs: config, prompts of the rows, player. name: of an environment of
    tests/environments.py. pool: of workers; None: calls are made in this process."""
    tokenizer = tokenizer or chat_tokenizer()
    settings = dict(environment=f"{FILE}:{name}", num_generations=2, max_completion_length=400)
    cfg = Config(**(settings | flags))
    rewards = load_rewards(flags.get("reward", "overlong"))
    environment = load_environment(cfg.environment, rewards)
    inline = Inline(environment, rewards)
    prompts = []
    for number, row in enumerate(table):
        observation = ""
        if environment.kind == "class":
            [outcome] = inline.call_all([("environment.observe", Transcript((), row, number, ""))])
            assert not outcome.cause, outcome
            observation = outcome.value
        prompt = rows.encode_prompt(row, tokenizer, cfg, environment, observation)
        prompt.seed = number
        prompt.observation = observation
        prompts.append(prompt)
    pool = pool or inline
    player = Player(environment, pool, tokenizer, [tokenizer.eos_token_id], prompts, cfg)
    return types.SimpleNamespace(
        cfg=cfg, prompts=prompts, player=player, tokenizer=tokenizer, pool=pool, rewards=rewards
    )


def inline_scorer(scene):
    """A scorer of the scene's rewards, which calls them where the environment was called."""
    scorer = Scorer(scene.rewards, environment=scene.player.environment)
    scorer.pool = scene.pool
    return scorer


def perform(scene, *rounds, greedy=False) -> list[Sample]:
    """Plays episodes whose turns are given. scene.script keeps what the sampler was asked."""
    scene.script = Script(scene.tokenizer, *rounds)
    seeds = list(range(len(scene.prompts)))
    return grpo.sample(
        scene.script, scene.prompts, seeds, scene.cfg, CPU, greedy, player=scene.player
    )


def replies_of(sample):
    """The ids of each reply, in their order."""
    edges = np.flatnonzero(np.diff(sample.sampled.astype(int))) + 1
    parts = np.split(np.arange(len(sample.sampled)), edges)
    return [sample.completion_ids[p].tolist() for p in parts if not sample.sampled[p[0]]]
