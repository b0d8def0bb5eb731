"""Environments: how they are loaded, what they are called with, what becomes of those that fail,
and what rewards see of an episode."""

import collections
import dataclasses
import json
import math
import re
import time

import pytest

import grpo
from grpo import Config
from harness import flags, jobs, player, rows, workers
from harness.environment import load_environment
from harness.flags import ConfigError, TrainingError
from harness.user_code import load_rewards, reward_row
from tests.common import BUNDLED, CPU, small_run
from tests.episodes import (
    FILE,
    Inline,
    Script,
    call_text,
    chat_tokenizer,
    inline_scorer,
    perform,
    stage,
)

pytest_plugins = "tests.common"

QUESTION = [dict(role="user", content="Well?")]


# ------------------------------------------------------------------------------------------------
# Loading


KINDS = dict(says="text", waits="text", TOOLS="tools", IncrementEnv="class", GAMES="class")


@pytest.mark.parametrize("name, kind", KINDS.items())
def test_the_kind_of_an_environment(name, kind):
    assert load_environment(f"{FILE}:{name}", []).kind == kind


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nonsense", "expected path/to/file.py:name"),
        ("missing.py:f", "No such file"),
        (f"{FILE}:nothing", "environments.py has no nothing"),
        (f"{FILE}:QUESTION", "is neither"),
        (f"{FILE}:asyncio", "is neither"),
        (f"{FILE}:roles", r"is neither fn\(turns, row\), nor a list of functions, nor a class"),
        (f"{FILE}:NOT_ALL_CLASSES", "nor a dict of such classes"),
        (f"{FILE}:letters_as_stop", "its stop is a text, where it must be a tuple of texts"),
        (f"{FILE}:TWICE", "two tools are called multiply"),
        (f"{FILE}:WITHOUT_HINTS", "Argument name is missing a type hint in function without_hints"),
        (f"{FILE}:WITHOUT_NAMES", "without_names: the policy names its arguments, .*a: int, /"),
        (f"{FILE}:PARTIAL", "functools.partial.* is no function"),
        (f"{FILE}:AbstractEnv", "Can't instantiate abstract class AbstractEnv"),
        (f"{FILE}:UndocumentedEnv", "Cannot generate JSON schema for calls"),
    ],
)
def test_what_is_no_environment_is_refused_in_one_line(spec, message, capsys, tmp_path):
    cfg = dict(environment=spec, out_dir=str(tmp_path))
    code = flags.exit_code("grpo.py", lambda: grpo.train(Config(**cfg)))
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1
    assert error.startswith(f"grpo.py: error: --environment {spec}: ")
    with pytest.raises(ConfigError, match=message):
        load_environment(spec, [])


BAD_FLAGS = [
    (dict(environment=f"{FILE}:TOOLS"), "tools need a chat"),
    (dict(environment=f"{FILE}:IncrementEnv"), "tools need a chat"),
    (dict(environment=f"{FILE}:says", max_turns=0), "--max_turns"),
    (dict(environment=f"{FILE}:says", max_turn_length=-1), "--max_turn_length"),
    (dict(environment=f"{FILE}:says", max_turn_length=41), "more than --max_completion_length"),
    (dict(max_turn_length=5), "--max_turn_length 5: .*--environment"),
    (dict(max_turns=3), "--max_turns 3: .*--environment"),
    (dict(environment=f"{FILE}:says", max_turns=1), "--max_turns 1: the environment never answers"),
    (dict(reward="environment"), "--reward environment needs"),
    (dict(reward="environment", environment=f"{FILE}:says"), "--reward environment needs"),
    (dict(reward=f"{FILE}:counters", environment=f"{FILE}:says"), "--reward counters needs"),
    (dict(reward="environment", environment=f"{FILE}:CountingEnv"), "has no get_reward"),
    (dict(call_timeout=0.0, environment=f"{FILE}:says"), "--call_timeout"),
    (dict(workers=0, environment=f"{FILE}:says"), "--workers"),
    (dict(environment=f"{FILE}:long_stop"), "its stop '1\\+' has 2 tokens"),
]


@pytest.mark.parametrize("options, message", BAD_FLAGS)
def test_impossible_values_stop_at_the_start(options, message, capsys, tmp_path):
    cfg = grpo.BUNDLED | dict(out_dir=str(tmp_path / "out"), rollout="hf") | options
    with pytest.raises(ConfigError, match=message):
        grpo.train(Config(**cfg))
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------
# reset()


def observations(name, table, workers=1):
    environment = load_environment(f"{FILE}:{name}", [])
    cfg = Config(environment=f"{FILE}:{name}", workers=workers, call_timeout=5)
    return player.first_observations(environment, table, list(range(len(table))), cfg)


def test_reset_draws_from_the_seed_of_its_row():
    """From random and from NumPy, also where reset() itself imports it."""
    first, second = observations("GuessEnv", [{}, {}])
    assert first != second
    scene = stage("GuessEnv", [dict(prompt=QUESTION)] * 2)
    assert [prompt.observation for prompt in scene.prompts] == [first, second]


def test_the_order_of_a_set_is_the_same_in_every_worker():
    assert len(set(observations("SetEnv", [{}] * 4, workers=2))) == 1


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("UnseededEnv", {}, "says two things to one row"),
        ("BrokenEnv", dict(how="raise"), "reset.. failed on row 1: exception: KeyError"),
        ("BrokenEnv", dict(how="int"), "reset.. failed on row 1: exception: .* said 5"),
        ("BrokenEnv", dict(how="die"), "reset.. failed on row 1: died"),
        ("GAMES", dict(environment="chess"), "'chess'; the environments are: increment, guess"),
        ("GAMES", {}, "column 'environment' is None"),
    ],
)
def test_a_reset_that_cannot_be_is_refused_in_one_line(name, row, message, monkeypatch, capfd):
    if row.get("how") != "die":

        class Pool(Inline):
            def close(self):
                pass

        monkeypatch.setattr(player, "make_pool", lambda _, environment, *rest: Pool(environment))
    with pytest.raises(ConfigError, match=f"^--environment [^\n]*{message}[^\n]*$"):
        observations(name, [row])


# ------------------------------------------------------------------------------------------------
# Kinds


def test_a_text_function_sees_turns_and_row():
    table = [dict(prompt="Well?", says=["a", ""])]
    for name in ("says", "waits"):
        scene = stage(name, table)
        one, other = perform(scene, ["1", "2"], ["3", "4"], ["5", "6"])
        assert len(scene.pool.jobs) == 6  # none after its last word
        assert one.transcript.turns == ["1", "3", "5"] and one.transcript.replies == ["a", ""]
        assert other.transcript.turns == ["2", "4", "6"]
        [*_, (_, transcript)] = scene.pool.jobs
        assert transcript.row == table[0] and transcript.turns == ["2", "4", "6"]


def test_a_stop_ends_a_turn_and_stays_in_its_text():
    scene = stage("hint", [dict(prompt="Well?", hint="5")])
    stop = scene.player.stop_ids[-1]
    assert scene.tokenizer.decode([stop]) == "="
    samples = perform(scene, [[stop], "no"], ["yes"])
    assert [s.transcript.turns for s in samples] == [["=", "yes"], ["no"]]
    assert [s.finish_reason for s in samples] == ["stop", "stop"]


def test_tools_answer_as_in_trl():
    """Results, errors, names that are no tool, async functions, calls in one turn: TRL's words."""
    table = [dict(prompt=QUESTION)]
    calls = [
        call_text("multiply", a=6, b=7),
        call_text("async_add", a=1, b=2),
        call_text("multiply", a=6),
        call_text("divide", a=6),
        call_text("fail", how="raise"),
    ]
    scene = stage("TOOLS", table, max_completion_length=2000)
    for tool in ("multiply", "async_add", "Multiplies two integers.", "The second integer."):
        assert tool in scene.prompts[0].text
    sample, other = perform(scene, ["Let us see." + "".join(calls), "no"], ["It is 42."])
    [messages] = sample.transcript.replies
    assert all(m["role"] == "tool" for m in messages)
    contents = [(m["name"], m["content"]) for m in messages]
    missing = "multiply() missing 1 required positional argument: 'b'"
    assert contents == [
        ("multiply", "42"),
        ("async_add", "3"),
        ("multiply", str({"error": missing})),
        ("divide", str({"error": "Tool divide not found."})),
        ("fail", str({"error": "'x'"})),
    ]
    assert sample.transcript.failed_calls == 3
    assert sample.text == "It is 42." and other.transcript.calls == []


@pytest.mark.parametrize(
    "turn",
    [
        "<tool_call>{</tool_call>",
        "<tool_call>5</tool_call>",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "multiply", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "multiply"',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    ],
)
def test_a_malformed_call_is_text_and_ends_the_episode(turn):
    scene = stage("TOOLS", [dict(prompt=QUESTION)])
    samples = perform(scene, [turn, turn])
    for s in samples:
        assert s.text == turn and s.transcript.replies == [] and s.finish_reason == "stop"


def test_calls_in_a_list_are_calls():
    """SmolLM was taught to write them so."""
    scene = stage("TOOLS", [dict(prompt=QUESTION)])
    one = '{"name": "multiply", "arguments": {"a": 6, "b": 7}}'
    turn = f"<tool_call>[{one}, {one}]</tool_call>"
    sample, _ = perform(scene, [turn, "no"], ["end"])
    assert [m["content"] for m in sample.transcript.replies[0]] == ["42", "42"]


QWEN3 = {  # a response_template, as tokenizers of newer models have it
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"close_pattern": r"(?=<tool_call>)|<\|im_end\|>|$", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


def test_a_tokenizer_that_parses_responses_reads_the_calls():
    tokenizer = chat_tokenizer()
    tokenizer.response_template = QWEN3
    scene = stage("TOOLS", [dict(prompt=QUESTION)], tokenizer)
    calls = "Now:" + call_text("multiply", a=6, b=7) + call_text("multiply", a=2, b=2)
    sample, other = perform(scene, [calls, "<tool_call>{</tool_call>"], ["It is 42."])
    assert [m["content"] for m in sample.transcript.replies[0]] == ["42", "4"]
    assert sample.transcript.calls == [[("multiply", dict(a=6, b=7)), ("multiply", dict(a=2, b=2))]]
    assert other.transcript.calls == []


def test_calls_of_a_form_that_is_not_read_are_refused_at_the_start():
    """As Qwen 3.5 and Llama 3 write them, without a response_template: no call would be made."""
    tokenizer = chat_tokenizer()
    form = "{{- '<function=' + call.function.name + '>' }}"
    written = "{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}"
    assert written in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(written, form)
    with pytest.raises(ConfigError, match="writes calls in a form [^\n]* response_template[^\n]*$"):
        stage("TOOLS", [dict(prompt=QUESTION)], tokenizer)
    tokenizer.response_template = QWEN3
    stage("TOOLS", [dict(prompt=QUESTION)], tokenizer)


def test_a_class_keeps_its_state_between_turns():
    scene = stage("IncrementEnv", [dict(prompt=QUESTION, says=" Start.", n=3)])
    assert scene.prompts[0].messages[-1]["content"] == "Well? Start."
    assert "get_reward" not in scene.prompts[0].text and "reset" not in scene.prompts[0].text
    one = call_text("increment", step=1)
    two = call_text("increment", step=2)
    first, second = perform(scene, [one, two], [one + one, two], ["end", "end"])
    contents = []
    for s in (first, second):
        contents.append([m["content"] for messages in s.transcript.replies for m in messages])
    assert contents == [["1", "2", "3"], ["2", "4"]]


def test_a_dict_of_classes_is_chosen_by_the_column_environment():
    table = [
        dict(prompt=QUESTION, environment="increment", says=" Count."),
        dict(prompt=QUESTION, environment="guess"),
    ]
    scene = stage("GAMES", table)
    assert scene.prompts[0].messages[-1]["content"] == "Well? Count."
    assert "increment" in scene.prompts[0].text and "Guess the secret" not in scene.prompts[0].text
    assert "Guess the secret" in scene.prompts[1].text
    turns = [call_text("increment", step=1), "no", call_text("guess", number=5), "no"]
    samples = perform(scene, turns, ["end", "end"])
    assert samples[0].transcript.replies[0][0]["content"] == "1"
    assert samples[2].transcript.replies[0][0]["content"].startswith("higher")


def test_a_reply_that_the_tokenizer_cannot_write_is_said_once(capsys):
    """A <think> of an environment is a text, which the bundled tokenizer has no letters for."""
    tokenizer = rows.load_tokenizer(BUNDLED)
    turns = [[tokenizer.eos_token_id]] * 2
    scene = stage("says", [dict(prompt="1+2=", says=["4+5="])], tokenizer=tokenizer)
    perform(scene, turns, turns)
    assert "warning" not in capsys.readouterr().out
    scene = stage("says", [dict(prompt="1+2=", says=["<think>"] * 2)], tokenizer=tokenizer)
    perform(scene, turns, turns, turns)
    out = capsys.readouterr().out
    assert out.count("unknown to the tokenizer: '<think>' is '<unk>") == 1


# ------------------------------------------------------------------------------------------------
# Rewards


def test_what_a_reward_sees_of_an_episode():
    """The last turn as completion, turns and replies; in TRL's form messages and objects."""
    names = (
        f"environment:100,{FILE}:counters:1000,{FILE}:tool_messages,{FILE}:roles:0.01,{FILE}:saw"
    )
    scene = stage("IncrementEnv", [dict(prompt=QUESTION)], reward=names)
    call = call_text("increment", step=3)
    samples = perform(scene, [call, "no"], [call + call], ["It is 9."])
    scores = grpo.score(samples, inline_scorer(scene), 1, scene.cfg)
    assert not scores.failures
    assert scores.by_reward == dict(
        environment=[9, 0], counters=[9, 0], tool_messages=[3, 0], roles=[32, 10], saw=[8, 2]
    )
    assert [s.text for s in samples] == ["It is 9.", "no"]
    trl = reward_row(samples[0], 1, scene.cfg)["completion_messages"]
    function = dict(name="increment", arguments=dict(step=3))
    made = dict(type="function", function=function)
    said = [dict(role="tool", name="increment", content=str(n)) for n in (3, 6, 9)]
    assert trl == [
        dict(role="assistant", content=call, tool_calls=[made]),
        said[0],
        dict(role="assistant", content=call + call, tool_calls=[made, made]),
        *said[1:],
        dict(role="assistant", content="It is 9."),
    ]


def test_flags_about_length_do_what_their_names_say():
    """overlong counts all that --max_completion_length limits; an episode without room is cut."""
    table = [dict(prompt="Well?", hint="5" * 8)]
    stop = [30]
    flags = dict(max_completion_length=12, reward="overlong")
    scene = stage("hint", table, **flags)
    [stop] = [i for i in scene.player.stop_ids if i != scene.tokenizer.eos_token_id]
    both = perform(scene, [[stop], "5"], [[stop]])
    assert [s.finish_reason for s in both] == ["length", "stop"]
    assert [(len(s.completion_ids), s.n_sampled) for s in both] == [(10, 2), (2, 2)]
    scores = grpo.score(both, inline_scorer(scene), 1, scene.cfg)
    assert scores.totals == [pytest.approx(0.0), 0.0]

    cfg = dataclasses.replace(scene.cfg, non_stop_reward=-3.0, mask_truncated=True)
    grpo.score(both, inline_scorer(scene), 1, cfg)
    assert [s.reward for s in both] == [-3.0, 0.0]
    grpo.assign_advantages(both, 1, cfg)
    assert [bool(s.in_loss.any()) for s in both] == [False, True]


# ------------------------------------------------------------------------------------------------
# Workers


@pytest.fixture(scope="module")
def pools():
    """pools(name, workers) -> a pool of workers that play an environment."""
    made = {}

    def make(name, reward="overlong", **options):
        settings = dict(timeout=2.0, workers=2) | options
        key = (name, reward, *settings.values())
        if key not in made:
            rewards = load_rewards(reward)
            environment = load_environment(f"{FILE}:{name}", rewards)
            made[key] = jobs.make_pool(rewards, environment, **settings)
        return made[key]

    yield make
    for pool in made.values():
        pool.close()


CAUSES = {
    "raise": "exception",
    "exit": "exception",
    "int": "exception",
    "million": "exception",
    "surrogate": "exception",
    "die": "died",
    "kill": "died",
    "hang": "timeout",
    "allocate": "memory",
    "fork": "",
    "print": "",
}


def test_each_misbehaviour_costs_its_own_episode(pools, capfd):
    table = [dict(prompt=QUESTION, how=how) for how in CAUSES]
    scene = stage("misbehaves", table, pool=pools("misbehaves"), num_generations=1)
    n = len(CAUSES)
    samples = perform(scene, ["a"] * n, ["b"] * 2)
    causes = [s.failure.partition(":")[0] for s in samples]
    assert causes == list(CAUSES.values())
    failed = [cause != "" for cause in causes]
    scorer = inline_scorer(scene)
    for failure in ("zero", "exclude"):
        cfg = dataclasses.replace(scene.cfg, reward_failure=failure)
        scores = grpo.score(samples, scorer, 1, cfg)
        counts = collections.Counter(f"environment_{cause}" for cause in causes if cause)
        assert scores.failures == counts and scores.failed == failed
        excluded = [math.isnan(s.reward) for s in samples]
        assert excluded == (failed if failure == "exclude" else [False] * n)
        assert all(s.reward == 0 for s in samples if not math.isnan(s.reward))
    metrics = scorer.failure_metrics([scores], 1, n)
    assert metrics["reward_failed/environment_died"] == 2
    assert metrics["failed_rewards"] == n - 2
    out, err = capfd.readouterr()
    assert "playing print" in err and "playing" not in out
    assert out.count("environment failed: ") == 1  # the first one is shown


def test_tools_that_misbehave(pools):
    """What a tool raises is told to the policy; what ends the process ends the episode."""
    hows = ("raise", "int", "million", "die")
    scene = stage("TOOLS", [dict(prompt=QUESTION)] * 2, pool=pools("TOOLS"))
    turns = [call_text("fail", how=how) for how in hows]
    samples = perform(scene, turns, ["end", "end"])
    causes = [s.failure.partition(":")[0] for s in samples]
    assert causes == ["", "", "exception", "died"]
    contents = [s.transcript.replies[0][0]["content"] for s in samples[:2]]
    assert contents == [str({"error": "'x'"}), "5"]


def test_an_environment_that_always_fails_ends_the_run(pools):
    table = [dict(prompt=QUESTION, how="raise")] * 2
    scene = stage("misbehaves", table, pool=pools("misbehaves"))
    samples = perform(scene, ["a"] * 4)
    scorer = inline_scorer(scene)
    scores = grpo.score(samples, scorer, 1, scene.cfg)
    with pytest.raises(TrainingError, match="^environment misbehaves failed in every episode"):
        scorer.failure_metrics([scores], 1, 4)
    scorer.failure_metrics([scores], 2, 4)  # a later step goes on


def test_a_worker_that_dies_costs_one_call_and_the_next_one_replays(pools):
    """Its objects are made again from the transcripts, in another process."""
    reward = f"environment,{FILE}:counters"
    pool = pools("FragileEnv", reward, workers=1)
    scene = stage("FragileEnv", [dict(prompt=QUESTION)], pool=pool, reward=reward)
    call = call_text("increment", step=3)
    samples = perform(scene, [call, call], [call, call_text("increment", step=0)], [call], ["end"])
    assert [s.failure.partition(":")[0] for s in samples] == ["", "died"]
    contents = [messages[0]["content"] for messages in samples[0].transcript.replies]
    assert contents == ["3", "6", "9"]
    pool.close()
    scores = grpo.score(samples, inline_scorer(scene), 1, scene.cfg)
    assert scores.by_reward == dict(environment=[9, 0], counters=[9, 0])
    assert scores.failures == {"environment_died": 1}


def test_a_replay_that_answers_otherwise_is_said(pools):
    pool = pools("FickleEnv", workers=1)
    scene = stage("FickleEnv", [dict(prompt=QUESTION)], pool=pool)
    call = call_text("increment", step=3)
    dies = call_text("increment", step=0)
    samples = perform(scene, [call, call], [call, dies], [call])
    message = "exception: ValueError: the same tool calls, repeated, had other results"
    assert samples[0].failure.startswith(message)
    assert samples[1].failure.startswith("died")


def test_calls_of_an_episode_go_to_one_worker(pools):
    """Which has its object: nothing is replayed. Both workers have some."""
    pool = pools("CountingEnv")
    table = [dict(prompt=QUESTION, number=i) for i in range(4)]
    scene = stage("CountingEnv", table, pool=pool, num_generations=1)
    turns = [call_text("calls")] * 4
    samples = perform(scene, turns, turns, turns, ["end"] * 4)
    for s in samples:
        contents = [messages[0]["content"] for messages in s.transcript.replies]
        assert contents == ["1", "1", "1"]
    place_of = scene.player.environment.place_of
    assert len({place_of(s.transcript) % 2 for s in samples}) == 2
    assert all(worker.process is not None for worker in pool.workers)


def test_rewards_in_trls_form_get_all_samples_in_one_call(pools):
    """Those that take `environments` get a call for each worker, with its own objects."""
    reward = f"{FILE}:together,{FILE}:of_worker"
    pool = pools("CountingEnv", reward)
    table = [dict(prompt=QUESTION, number=i) for i in range(5)]
    scene = stage("CountingEnv", table, pool=pool, num_generations=1, reward=reward)
    samples = perform(scene, [call_text("calls")] * 5, ["end"] * 5)
    scores = grpo.score(samples, inline_scorer(scene), 1, scene.cfg)
    assert scores.by_reward["together"] == [5.0] * 5
    place_of = scene.player.environment.place_of
    workers = [place_of(s.transcript) % 2 for s in samples]
    assert scores.by_reward["of_worker"] == [workers.count(worker) for worker in workers]
    assert len(set(workers)) == 2


# ------------------------------------------------------------------------------------------------
# Eval and runs


def test_greedy_eval_plays_episodes():
    """One episode a prompt. Its first reward is the accuracy, its sampled tokens are the length."""
    table = [dict(prompt=QUESTION, n=i) for i in range(3)]
    scene = stage("IncrementEnv", table, reward="environment")
    call = call_text("increment", step=1)
    scene.script = Script(scene.tokenizer, [call, "no", call], ["fine", call], ["end"])
    task = (scene.script, scene.prompts, scene.tokenizer, inline_scorer(scene), 0, scene.cfg, CPU)
    metrics = grpo.evaluate(*task, scene.player)
    assert metrics["eval_accuracy"] == pytest.approx((1 + 0 + 2) / 3)
    lengths = [3 * len(scene.script.ids_of(call)), *map(scene.script.ids_of, ("no", "fine", "end"))]
    total = lengths[0] + sum(map(len, lengths[1:]))
    assert metrics["eval_length"] == pytest.approx(total / 3)


RUN = dict(environment=f"{FILE}:misbehaves", max_completion_length=40)


def rows_file(folder, hows):
    """Rows whose prompts get short answers: no episode is cut off before the environment's turn."""
    rows = [dict(prompt="11+22=", how=how) for how in hows]
    path = folder / "hows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_failed_episodes_are_counted_and_the_run_goes_on(tmp_path, capfd):
    data = rows_file(tmp_path, ("raise", "ok"))
    steps = small_run(tmp_path / "out", train_data=data, max_steps=2, workers=3, **RUN)
    assert len(steps) == 2
    for m in steps:
        assert m["reward_failed/environment_exception"] in (5, 10)  # groups of five
        assert m["failed_rewards"] == m["reward_failed/environment_exception"]
    out, err = capfd.readouterr()
    assert out.count("environment failed:") == 1  # the first one is shown
    assert len(set(re.findall("playing [a-z]+ in ([0-9]+)", err))) == 3  # --workers


def test_an_environment_that_hangs_ends_the_run_soon(tmp_path, monkeypatch, capfd):
    """--call_timeout is its limit; after some timeouts in a row all calls are given up."""
    monkeypatch.setattr(workers, "PATIENCE", 3)
    options = RUN | dict(train_data=rows_file(tmp_path, ["hang"]), workers=1, call_timeout=0.3)
    started = time.monotonic()
    with pytest.raises(TrainingError, match="^environment misbehaves failed in every episode"):
        small_run(tmp_path / "out", **options)
    assert time.monotonic() - started < 30  # the default alone would take as long
    out, err = capfd.readouterr()
    assert "environment failed: timeout: " in out
    assert err.count("playing hang") == 3
