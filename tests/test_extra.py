"""What stands in grpo.py always runs, whatever is changed there, and what extras/ add is there all
the same. Changed copies run as scripts, with extras/ and with --plain."""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import grpo
from extras import digests, models, preflight, runs, screen
from extras.errors import ConfigError
from tests.common import (
    HERE,
    checkpoints,
    fake_run,
    lines,
    metrics_of,
    page_with,
    run_page,
    small_config,
    small_rows,
    tiny_model,
)

TEXT = Path(HERE, "grpo.py").read_text()
MARKED = re.findall(r'@extra\("(\w+)"\)\ndef (\w+)', TEXT)
OF_VLLM = {"vllm_options", "tensors_of", "fill_with_nan", "after_push", "repack"}
FILES = sorted(Path(HERE, "extras").glob("[a-z]*.py"))


def replaced(*pairs, text=TEXT):
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def patched(diff, text=TEXT):
    """Its hunks stand apart by empty lines."""
    for hunk in diff.strip("\n").split("\n\n"):
        lines = hunk.split("\n")
        old, new = ("\n".join(x[1:] for x in lines if x[0] != skipped) for skipped in "+-")
        text = replaced((old, new), text=text)
    return text


def last_state(out):
    return torch.load(Path(checkpoints(out)[-1], "trainer_state.pt"), weights_only=False)


# ------------------------------------------------------------------------------------------------
# The house


@pytest.mark.parametrize("file, name", MARKED)
def test_a_wrapper_takes_what_the_page_passes_and_what_it_will_pass(file, name):
    wrapper = getattr(importlib.import_module(f"extras.{file}"), name)
    of_page = list(inspect.signature(getattr(grpo, name)).parameters)
    parameters = inspect.signature(wrapper).parameters.values()
    positional = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert positional[0] == "plain" and positional[1:] == of_page[: len(positional) - 1]
    kinds = {p.kind for p in parameters}
    assert {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds


def imports_of(nodes):
    """The files of extras/ that these import."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "extras":
            names = [alias.name for alias in node.names]
            yield from names if node.module == "extras" else [node.module.partition(".")[2]]


def test_extras_import_from_floors_below_only():
    """Also inside functions. And all that they need at the start is looked for."""
    package = importlib.import_module("extras")
    floors = [
        line.split("  ")[2].split(", ") for line in package.__doc__.split("\n") if "   " in line
    ]
    floor = {name: number for number, names in enumerate(floors) for name in names}
    assert {*floor, "dashboard"} == {path.stem for path in FILES}
    at_start = set()
    for path in FILES:
        tree = ast.parse(path.read_text())
        for name in imports_of(ast.walk(tree)):
            assert name == "dashboard" or floor[name] > floor[path.stem], (path.stem, name)
        at_start.update(imports_of(tree.body))
    assert {*package.NEEDED} == at_start | {file for file, _ in MARKED}


def test_the_table_of_known_code_is_new():
    """`python -m extras.digests` renews it. Each Python from 3.11 on must compute the same: they
    differ in f-strings."""
    assert digests.changed(*digests.WRITTEN_FOR) == []
    nodes = ast.parse(TEXT).body
    [files] = (node for node in nodes if getattr(node, "name", "") == "RunFiles")
    page = {getattr(node, "name", ""): node for node in files.body + nodes}
    for name in digests.WRITTEN_FOR:
        assert not [x for x in ast.walk(page[name]) if isinstance(x, ast.JoinedStr)], name


def test_a_missing_part_is_one_line(tmp_path):
    """Of what all runs need, and of what one flag does."""
    page = page_with(tmp_path / "page", alone=True)
    shutil.copytree(f"{HERE}/extras", page / "extras", ignore=lambda *_: ["__pycache__", "lora.py"])
    said = run_page(page, "--lora_rank", "2", code=2)
    assert said.count("\n") == 1 and "lora" in said
    (page / "extras" / "packed.py").unlink()
    said = run_page(page, code=2)
    assert said.count("\n") == 1 and "packed.py" in said and not (page / "run").exists()


@pytest.mark.parametrize("place", ["page/extras", "later/extras"])
def test_a_foreign_package_of_that_name_is_not_ours(place, tmp_path):
    page = page_with(tmp_path / "page", alone=True)
    path = tmp_path / place
    path.mkdir(parents=True)
    (path / "__init__.py").write_text("raise_if_asked = True\n")
    said = run_page(page, path=str(path.parent))
    assert "extras/ is not used" in said and len(metrics_of(page / "run")) == 1


def test_a_second_copy_in_a_process_is_plain():
    """Wrappers would call other functions of the first."""
    spec = importlib.util.spec_from_file_location("second", f"{HERE}/grpo.py")
    second = importlib.util.module_from_spec(spec)
    sys.modules["second"] = second
    spec.loader.exec_module(second)
    assert second.all_gather([1]) == [1] and not second.USE_EXTRAS


# ------------------------------------------------------------------------------------------------
# Copies that are touched everywhere


class Touch(ast.NodeTransformer):
    """Each function says that it runs. A marked one has a new argument, which the page passes."""

    marked = {name for _, name in MARKED}

    def __init__(self):
        self.names = set()

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        self.names.add(node.name)
        line = f"sys.stderr.write('RUNS {node.name}\\n')"
        if node.name in self.marked:
            node.args.args.append(ast.arg("mine"))
            node.args.defaults.append(ast.Constant(None))
            line = f"sys.stderr.write(f'RUNS {node.name} {{mine}}\\n')"
        node.body.insert(1 if ast.get_docstring(node) else 0, ast.parse(line).body[0])
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        if getattr(node.func, "id", "") in self.marked:
            node.keywords.append(ast.keyword("mine", ast.Constant("given")))
        return node


def test_what_stands_in_the_page_runs_and_gets_its_new_arguments(tmp_path):
    touch = Touch()
    text = ast.unparse(ast.fix_missing_locations(touch.visit(ast.parse(TEXT))))
    page = page_with(tmp_path / "page", text)
    rows = small_rows(tmp_path)
    options = dict(eval_data=rows, eval_samples=2, beta=0.1, keep=1, max_steps=2)
    said = run_page(page, **options)
    missing = {name for name in touch.names if f"RUNS {name}" not in said}
    # The others are called in other runs: options of the loss, vLLM, a signal.
    of_vllm = OF_VLLM | {"wake_up"}
    assert missing <= of_vllm | {"sequence_ratio", "kl_from_here_on", "request_stop", "sleep"}
    for name in touch.marked - missing - {"main"}:
        assert f"RUNS {name} given\n" in said, name


WANDB = """
def init(**o): print('INIT')
def log(o): print('LOG')
def define_metric(*a, **o): ...
def finish(**o): ...
"""


@pytest.fixture(scope="module")
def touched(tmp_path_factory):
    """A page that an editor has formatted, with comments everywhere."""
    formatted = [sys.executable, "-m", "ruff", "format", "--line-length", "88", "-"]
    text = subprocess.run(formatted, input=TEXT, capture_output=True, text=True, check=True).stdout
    assert text != TEXT
    text = re.sub(r"(?m)^( *)(return|for|if) ", r"\1# mine\n\1\2 ", text)
    last = "    return run.files.history"
    shown = f"    print('MINE', run.policy.model.is_gradient_checkpointing)\n{last}"
    text = replaced((last, shown), text=text)
    page = page_with(tmp_path_factory.mktemp("touched") / "page", text)
    (page / "rows.jsonl").write_text('{"prompt": "1+2="}\n{"prompt": "3+4="}\n')
    (page / "wandb.py").write_text(WANDB)
    (page / "says.py").write_text(
        "def says(turns, row):\n    return None if len(turns) > 1 else 'on'\n"
    )
    shutil.copytree(f"{HERE}/sample_data/model", page / "model")
    (page / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ strftime_now('%Y') }}="
    )
    return page


def test_flags_of_extras_work_in_a_page_that_is_touched(touched):
    flags = "--lora_rank 2 --system_prompt 5+ --weight_decay 5000"
    flags += " --report_to wandb --began 1999-01-01 --log_completions 3"
    options = dict(model=str(touched / "model"), train_data=str(touched / "rows.jsonl"))
    said = run_page(touched, *flags.split(), learning_rate=1e-4, **options)
    rows = lines(touched / "run" / "completions.jsonl")
    assert len(rows) == 3 and rows[0]["prompt"].startswith("5+") and "tokens" in rows[0]
    assert rows[0]["prompt"].endswith("1999=") and "INIT" in said and "LOG" in said
    state = last_state(touched / "run")
    assert state["adapters"] and len(state["moments"]) == len(state["adapters"])
    began = [x * x.shape[1] ** 0.5 for name, x in state["adapters"].items() if "lora_A" in name]
    assert max(x.abs().max() for x in began) < 0.3  # two steps have halved them, from up to 1


def test_an_environment_plays_and_layers_are_checkpointed_in_a_page_that_is_touched(touched):
    flags = ["--environment", "says.py:says", "--gradient_checkpointing", "--max_turns", "3"]
    assert "MINE True" in run_page(touched, *flags, out="turns", max_completion_length=32)
    [metrics] = metrics_of(touched / "turns")
    assert metrics["turns/mean"] > 1


MAIN = 'if __name__ == "__main__":\n'
LARGE = (
    MAIN,
    f"{MAIN}    if USE_EXTRAS:\n        importlib.import_module('extras.fast').SMALL = 0\n",
)
OF_POLICY = r"""
+        warm = 1 + 0.5 * getattr(self, "step", 0)
         with autocast(self.model.device, self.dtype):

-        return logps_of(logits, batch["targets"], self.temperature)
+        logps, entropy = logps_of(logits, batch["targets"], self.temperature * warm)
+        learns = torch.cat([torch.arange(n) < 3 for n in batch["lengths"]])
+        learns &= batch["advantages"] >= 0
+        return torch.where(learns, logps, logps.detach()), entropy

+    samples = [s for s in samples if s.advantages.sum() <= 0.5]
     samples = sorted(samples, key=lambda s: -s.total_length)

-    return logps.gather(-1, targets[:, None])[:, 0], entropy
+    logps = logps.gather(-1, targets[:, None])[:, 0]
+    return torch.where(targets > 1, logps, logps.detach()), entropy

-        step, G = run.step + 1,
+        step, run.policy.step, G = run.step + 1, run.step,
"""


def test_forms_for_speed_stand_in_while_the_code_is_the_known_one(touched, tmp_path):
    """Comments and layout are no code. Of a changed Policy, micro_batches and logps_of each is
    said, and runs: the numbers are those of --plain."""
    mine = touched.parent / "large"
    shutil.copytree(touched, mine, symlinks=True)
    (mine / "grpo.py").write_text(replaced(LARGE, text=(touched / "grpo.py").read_text()))
    options = dict(rollout="hf", compile="off", max_sampler_gap=9.0)
    assert "PackedPolicy with FastPolicy" in run_page(mine, out="fast", **options)
    assert "Policy" not in run_page(mine, "--fast", "false", out="slow", **options)
    page = page_with(tmp_path / "page", patched(OF_POLICY, replaced(LARGE)))
    said = run_page(page, max_steps=2, **options)
    assert "Policy, micro_batches, logps_of changed" in said
    run_page(page, "--plain", out="plain", max_steps=2, **options | dict(compile="auto"))
    same_numbers(page / "run", page / "plain")


LATE = {  # changes of the loop, and what the line names
    "run.policy.model.lm_head.register_forward_hook(lambda *x: None)": "class of the head",
    "Policy.forward = lambda self, batch: None": "Policy",
    "globals().update(micro_batches=lambda samples, cfg: [samples])": "micro_batches",
    "Policy.__call__ = lambda self, batch: None": "Policy",
}


def test_a_change_in_the_midst_of_a_run_is_refused_where_another_form_runs(touched, tmp_path):
    """It would have run in the plain form, and not in the one that stands in for it."""
    page, loop = touched.parent / "late", "        step, G = run.step + 1,"
    shutil.copytree(touched, page, symlinks=True)
    text = replaced(LARGE, text=(touched / "grpo.py").read_text())
    for change, name in LATE.items():
        (page / "grpo.py").write_text(replaced((loop, f"        {change}\n{loop}"), text=text))
        said = run_page(page, out=name, code=1, rollout="hf", compile="off")
        assert f"{name} changed after the start: " in said, change
        shutil.rmtree(page / name)


# A head beside the model; a sum and a maximum for the log; and what else extras/ took over.
MORE = r"""
+        self.bias = nn.Parameter(torch.zeros(()))
         self.dtype = dtype  # of matrix products

-        return logps_of(logits, batch["targets"], self.temperature)
+        logps, entropy = logps_of(logits, batch["targets"], self.temperature)
+        return logps * (1 + self.bias), entropy

+    stats["ratio_max"] = 1 + 0 * logps.sum()
     if sampler_logps is not None:

+    print("BIAS", run.policy.bias.item())
     while not run.should_stop():

-    auto = dict(device=
+    print("MINE", cfg.rollout)
+    auto = dict(device=

-    rollout: Literal["auto", "vllm", "hf"] = "auto"
+    rollout: Literal["auto", "vllm", "hf", "mine"] = "mine"

-    if run.cfg.rollout == "hf":
+    if run.cfg.rollout == "mine":

+    torch.optim.lr_scheduler.LinearLR(run.optimizer)
     run_loop(run)
"""


def test_what_a_policy_has_beside_the_model_is_resumed(tmp_path):
    """And a name that ends in max is the largest of all minibatches, a choice of --rollout is
    yours, and torch's schedulers can wrap the optimizer."""
    page = page_with(tmp_path / "page", patched(MORE))
    options = dict(num_minibatches=2, save_every=1)
    run_page(page, out="whole", max_steps=2, **options)
    biases = [run_page(page, max_steps=n, resume=n > 1, **options) for n in (1, 2)]
    biases = [float(re.search(r"BIAS (\S+)", said)[1]) for said in biases]
    assert biases[0] == 0 != biases[1]
    same_numbers(page / "run", page / "whole")
    assert (
        last_state(page / "run")["policy"]["bias"] == last_state(page / "whole")["policy"]["bias"]
    )
    assert all(m["ratio_max"] == 1 for m in metrics_of(page / "run"))


# ------------------------------------------------------------------------------------------------
# The page's value wins: changes that an extra could undo after the plain function has run

MINE = r"""
+    note: str
     completion_ids: np.ndarray  #

             completions += sample_batch(self.model, prompts[part], seeds[part], *rest)
+        completions = [c | dict(note="") for c in completions]

+        os.kill(os.getpid(), signal.SIGUSR1)
         run.sampler.sleep()  # the

         run.end_step(step, samples, metrics)  # a checkpoint from here on includes this step
+        run.optimizer.step()

+        run.state["patience"] = run.state.get("patience", 0) + 1
+        run.state |= {"seen": {step}, ("a", 1): step}
         run.files.save_if_due(run)

+    metrics |= dict(advantage_abs=42, failed_rewards=42)
     metrics["reward"], metrics

+    temperature = 0.6
     at_once = max(1,

+    job: str = "sweep7"
+    top_k: int = -1
     seed: int = 0

-    dtype = dict(cpu="float32",
+    dtype = dict(cpu="bfloat16",

-    return [p for p in prompts if
+    return [p for p in prompts[1:] if

+    if path.endswith(".csv"):
+        yield from [dict(prompt=f"{i}+1=") for i in range(6)]
+        return
     with open(path, encoding

+    row["asked"] = [cfg.prompt_template, cfg.chat]
     text, messages = content_of(

-        content = cfg.prompt_template.format
+        content = "9" + cfg.prompt_template.format

-    return transformers.AutoTokenizer.from_pretrained(path)
+    return transformers.AutoTokenizer.from_pretrained(path, padding_side="left")

-    return model.to(device).eval()
+    del model.model.layers[2:], model.config.layer_types[2:]
+    model.config.num_hidden_layers, model.config.attention_dropout = 2, 0.3
+    model.lora_A = nn.Parameter(torch.rand(1))
+    model.lm_head.register_forward_hook(lambda *x: x[-1] + 0 * model.lora_A)
+    return model.to(device).train()

-    return torch.optim.AdamW(policy.parameters(), **options)
+    first, *others = policy.parameters()
+    groups = [dict(params=[first], lr=cfg.learning_rate / 10), dict(params=others)]
+    inner = torch.optim.AdamW(groups, **options)
+    parts = dict(param_groups=inner.param_groups, state=inner.state)
+    return SimpleNamespace(step=inner.step, zero_grad=inner.zero_grad, **parts)

-            self.write("config.json", json.dumps(asdict(run.cfg), indent=1))
+            self.write("config.json", json.dumps(asdict(run.cfg) | dict(git="abc")))

-            rows.append(dict(step=run.step, group=s.group) | texts | dict(reward=s.reward))
+            rows.append(dict(step=run.step, group=s.group) | texts | dict(length=42, advantage=42))

-        return dict(step=run.step, state
+        return dict(evals="mine", step=run.step, state

+        self.started = self.usr1 = 0
         self.stop_requested = False

+    signal.signal(signal.SIGUSR1, lambda *_: setattr(run, "usr1", run.usr1 + 1))
     run_loop(run)

+    [prompt, *_], config = run.train_prompts, run.policy.model.config
+    saved = json.loads(Path(run.files.path, "config.json").read_text())
+    seen = dict(prompt=prompt.text, asked=prompt.row["asked"], n=len(run.train_prompts))
+    seen |= dict(side=run.tokenizer.padding_side, training=run.policy.model.training)
+    seen |= dict(dropout=config.attention_dropout, dtype=run.cfg.dtype, started=run.started)
+    seen |= {name: saved[name] for name in ("job", "git", "top_k")}
+    seen |= dict(usr1=run.usr1, lrs=[group["lr"] for group in run.optimizer.param_groups])
+    Path("seen.json").write_text(json.dumps(seen))
     return run.files.history

+from types import SimpleNamespace
 from typing import Any, Literal
"""


def same_numbers(with_extras, plain):
    for more, expected in zip(metrics_of(with_extras), metrics_of(plain), strict=True):
        assert {name: more[name] for name in expected} == expected


def test_the_pages_value_wins(tmp_path):
    page = page_with(tmp_path / "page", patched(MINE))
    (page / "rows.csv").write_text("no rows\n")
    options = dict(train_data="rows.csv", eval_data=small_rows(tmp_path), eval_every=1)
    options |= dict(prompt_template="{prompt}", dtype="auto", max_sampler_gap=9.0)
    options |= dict(lr_schedule="linear", warmup_steps=1, micro_batch_tokens=300)
    for out, steps, flags in (("run", 2, []), ("plain", 2, ["--plain"]), ("run", 3, [])):
        said = run_page(page, *flags, out=out, max_steps=steps, resume=steps == 3, **options)
        assert flags or "left out by load_prompts" in said
        seen = json.loads((page / "seen.json").read_text())
        rate = 3e-4 / (2 * steps - 1)  # in the last optimizer step
        assert seen.pop("lrs") == pytest.approx([rate / 10, rate])
        expected = dict(prompt="91+1=", asked=["{prompt}", False], n=5, side="left", started=0)
        expected |= dict(dropout=0.3, training=True, dtype="bfloat16", job="sweep7", top_k=-1)
        assert seen == expected | dict(git="abc", usr1=2 if steps == 2 else 1)
        steps_logged = [m for m in lines(page / out / "metrics.jsonl") if "loss" in m]
        assert [m["advantage_abs"] for m in steps_logged] == [42] * steps
        assert {row["length"] for row in lines(page / out / "completions.jsonl")} == {42}
        state = last_state(page / out)
        assert state["state"] == {"patience": steps, "seen": {steps}, ("a", 1): steps}
        assert state["evals"] == "mine" and state["step"] == steps
        saved = Path(checkpoints(page / out)[-1])
        assert json.loads((saved / "config.json").read_text())["num_hidden_layers"] == 2
        assert b'"lora_A"' in (saved / "model.safetensors").read_bytes()[:10000]
        if flags:
            same_numbers(page / "run", page / "plain")


OF_FILES = r"""
+    logs: Path = Path("my/logs")
     seed: int = 0

-    report_to: Literal["none",
+    report_to: Literal["none", "tensorboard",

-            self.write("config.json", json.dumps(asdict(run.cfg), indent=1))
+            self.write("config.json", json.dumps(asdict(run.cfg), default=str))

-        self.history.append(metrics)
+        metrics["tokens_per_s"] = 7.5
+        self.history.append(metrics)

-            rows.append(dict(step=run.step, group=s.group) | texts | dict(reward=s.reward))
+            rows.append(dict(step=f"{run.step}/3", group=s.group) | texts | dict(reward=s.reward))

+        text = text.replace("{", '{"note": "mine",', 1) if name == "config.json" else text
         with open(self.path / name, mode) as file:

-        if run.is_due(run.cfg.save_every):
-            self.save(run)
+        return

-    return "".join(json.dumps(row) + "\n" for row in rows)
+    indents = [0 if row.get("group") == 0 else None for row in rows]
+    texts = [json.dumps(row, indent=n) for row, n in zip(rows, indents)]
+    return "".join(f"{text}\n" for text in texts)

+    accuracy = np.float32(run.step)
     metrics = dict(eval_accuracy

-    model, info = kind.from_pretrained(path, dtype=dtype, output_loading_info=True)
-    for name in info["missing_keys"]:  # they would be random
-        raise ValueError("its files have no weights for " + name)
-    model.get_input_embeddings().padding_idx = None  # often the EOS, which must learn, too
-    return model.to(device).eval()
+    global LAST
+    import peft
+    model = kind.from_pretrained(cfg.model, dtype=dtype)
+    if os.path.exists(f"{path}/adapter_config.json"):
+        LAST = peft.PeftModel.from_pretrained(model, path, is_trainable=True)
+    else:
+        LAST = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
+    return LAST

-    run_loop(run)
+    print("MY MODEL IS", LAST is run.policy.model)
+    run_loop(run)

-class Config:
+class MyFlags:
+    mine: int = 7  # MY OWN
+
+
+@dataclass
+class Config(MyFlags):
"""


def test_files_of_mine_and_flags_of_mine(tmp_path):
    """Logs in a layout of mine are not cut; of the others see tests/test_safety.py."""
    page = page_with(tmp_path / "page", patched(OF_FILES))
    options = dict(eval_data=small_rows(tmp_path), eval_every=1, beta=0.0)
    for steps in (2, 3):
        flags = ["--report_to", "tensorboard", "--logs", "here"]
        said = run_page(page, *flags, max_steps=steps, resume=steps == 3, **options)
        assert said.count("tokens_per_s 7.5") == {2: 5, 3: 2}[steps]  # steps and evals
        assert "MY MODEL IS True" in said
        assert [path[-1] for path in checkpoints(page / "run")] == ["2", "3"][: steps - 1]
        text = Path(page, "run", "completions.jsonl").read_text()
        assert [text.count(f'"step": "{step}/3"') for step in (1, 2, 3)][:steps] == [15] * steps
        config = json.loads(Path(page, "run", "config.json").read_text())
        assert config["note"] == "mine" and config["logs"] == "here" and config["about"]["files"]
    assert [m["eval_accuracy"] for m in metrics_of(page / "run")[::2]] == [0, 1, 2, 3]
    said = run_page(page, "--help")
    assert "--mine: int = 7  # MY OWN\n" in said and "--seed: int = 0" in said


MORE_LEARN = r"""
-    return model.to(device).eval()
+    model.scale = nn.Parameter(torch.ones(1))
+    model.lm_head.register_forward_hook(lambda module, _, y: y * model.scale)
+    return model.to(device).eval()

+    policy.model.model.norm.weight.requires_grad_(True)
     options: dict = dict(lr=cfg.learning_rate, w

-    run_loop(run)
+    show_mine = lambda: print("MINE", model.scale.item(), *model.model.norm.weight.tolist())
+    model = run.policy.model
+    show_mine()
+    run_loop(run)
+    show_mine()
"""


def test_what_learns_beside_adapters_is_saved_and_refuses_a_reference_without(tmp_path):
    page = page_with(tmp_path / "page", patched(MORE_LEARN))
    said = run_page(page, "--lora_rank", "2", beta=0.0)
    begin, end = (line.split()[1:] for line in said.split("\n") if line.startswith("MINE"))
    assert begin[0] == "1.0" != end[0] and not set(begin[1:]) & set(end[1:])
    said = run_page(page, "--lora_rank", "2", beta=0.1, max_steps=2, resume=True, code=2)
    assert f"MINE {' '.join(end)}\n" in said and "error: --reference: " in said


ELSEWHERE = r"""
-    log_completions=64, report_to="none")
+    log_completions=64, report_to="none"); del ONLY_WITH_EXTRAS["weight_decay"]

-@extra("models")
-def make_optimizer(
+def make_optimizer(

-        with open(self.path / name, mode) as file:
+        (self.path / "logs").mkdir(exist_ok=True)
+        with open(self.path / "logs" / name, mode) as file:

+def load_rewards(spec, theirs=load_rewards):
+    return theirs(spec.replace("mine", "overlong"))
+
+
 HERE = os
"""


def test_files_elsewhere_rewards_and_a_served_flag_of_mine(tmp_path):
    page = page_with(tmp_path / "page", patched(ELSEWHERE.replace("    log_c", "dict(log_c")))
    run_page(page, "--weight_decay", "0.1", reward="mine")
    assert len(metrics_of(page / "run" / "logs")) == 1
    config = json.loads(Path(page, "run", "logs", "config.json").read_text())
    assert config["weight_decay"] == 0.1 and config["about"]["files"]


def test_a_mark_over_another_name_is_one_line(tmp_path):
    """Renamed; or below it a decorator that hides the name."""
    hidden = '@extra("models")\n@(lambda f: lambda *args: f(*args))\ndef load_tokenizer('
    edits = [("make_optimizer", [("def make_optimizer(", "def my_optimizer(")])]
    edits[0][1].append(("optimizer = make_optimizer(", "optimizer = my_optimizer("))
    edits.append(("<lambda>", [('@extra("models")\ndef load_tokenizer(', hidden)]))
    for number, (name, pairs) in enumerate(edits):
        said = run_page(page_with(tmp_path / f"{number}", replaced(*pairs)), code=2)
        assert "Traceback" not in said and "error: " in said and "functools.wraps" in said
        assert name.replace("make", "my") in said


SEEN = """
     run_loop(run)
+    seen = [[p.text, run.tokenizer.decode(p.ids)] for p in run.train_prompts]
+    Path("seen.json").write_text(json.dumps(seen))
"""
# Of each page, how it makes prompts: rows of all files in turns, chats in JSON, a cut on the left;
# another way to fill in --prompt_template, ids that are not the file's; a class of its own.
PROMPTS = """
-@dataclass
+@dataclass(frozen=True)
 class Config:

-    return [p for p in prompts if len
+    return [p for p in prompts if p and len

-    with open(path, encoding="utf-8-sig") as lines:  # some editors write a byte order mark
-        yield from map(json.loads, filter(str.strip, lines))
+    lines = [line for many in zip(*map(open, path.split(","))) for line in many]
+    yield from (json.loads(line) for line in lines if not line.startswith("//"))

-    text, messages = content_of(row, cfg), None
+    text, messages = content_of(row, cfg), None
+    if text is None:
+        return None
+    tokenizer.truncation_side = "left"
+    tokenizer.chat_template = "{{ messages[0].content }}="

-    ids = tokenizer(text, add_special_tokens=messages is None)["input_ids"]
+    ids = tokenizer.encode(text, truncation=True, max_length=4)

-    content = row.get("prompt")
+    content = row["prompt"] and json.loads(row["prompt"])
"""
FILLED = """
-        content = cfg.prompt_template.format(**row)
+        content = cfg.prompt_template.replace("{{prompt}}", row["prompt"])

-    return transformers.AutoTokenizer.from_pretrained(path)
+    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
+    make, ids = tokenizer._encode_plus, dict(special_tokens=[("<eos>", 1)])
+    from tokenizers.processors import TemplateProcessing
+    end = TemplateProcessing("$A <eos>", **ids)
+    tokenizer.backend_tokenizer.post_processor = end
+    tokenizer._encode_plus = lambda text, **options: make("<pad>" + text, **options)
+    return tokenizer
"""
OWN_CLASS = """
+class Digits:
+    eos_token_id = 1
+
+    def __call__(self, text, **options):
+        return dict(input_ids=[5 + "0123456789+= ".index(letter) for letter in text])
+
+    def decode(self, ids, **options):
+        return "".join("0123456789+= "[i - 5] for i in ids if i > 4)
+
+    def save_pretrained(self, folder): ...
+
+
 @extra("models")
 def load_tokenizer(

-    return transformers.AutoTokenizer.from_pretrained(path)
+    return Digits()
"""


def test_rows_prompts_and_ids_are_those_that_the_page_makes(tmp_path):
    chats = [json.dumps([dict(role="user", content=f"{i}+{i}")]) for i in range(10, 14)]
    texts = [json.dumps(dict(prompt=chat)) + "\n" for chat in chats]
    expected = [[f"{i}+{i}=", f"+{i}="] for i in (10, 12, 13)]
    cases = [(PROMPTS, "a.jsonl,b.jsonl", "", expected)]
    cases += [(FILLED, "c.jsonl", "{{prompt}}0=", [["7+10=", "<pad>7+10=<eos>"]])]
    cases += [(OWN_CLASS, "c.jsonl", "{prompt}0=", [["7+10=", "7+10="]])]
    for n, (change, files, template, expected) in enumerate(cases):
        page = page_with(tmp_path / str(n), patched(SEEN, patched(change)))
        (page / "a.jsonl").write_text(texts[0] + "// a note\n" + texts[3])
        (page / "b.jsonl").write_text('{"prompt": null}\n' + texts[2] + '{"prompt": null}\n')
        (page / "c.jsonl").write_text('{"prompt": "7+1"}\n')
        run_page(page, train_data=files, prompt_template=template)
        assert json.loads((page / "seen.json").read_text()) == expected, change


def test_what_cannot_count_is_refused_or_names_the_line(tmp_path):
    """An error in a function of the page; a mark that serves a flag and is gone, train's, too."""
    page = page_with(tmp_path / "page", replaced(("    cache = None  #", "    cache = oops  #")))
    line = 1 + (page / "grpo.py").read_text().partition("oops")[0].count("\n")
    assert f"(grpo.py:{line}, sample_batch)" in run_page(page, code=2)
    shown = (
        "    shown = [",
        "    if samples:\n        raise TrainingError('enough')\n    shown = [",
    )
    page = page_with(tmp_path / "shown", replaced(shown))
    assert "error: enough" in run_page(page, code=1) and len(checkpoints(page / "run")) == 1
    unmarked = [(f'@extra("{file}")\ndef {name}(', f"def {name}(") for file, name in MARKED
                if name in ("train", "run_loop", "make_optimizer")]  # fmt: skip
    page = page_with(tmp_path / "unmarked", replaced(*unmarked))
    assert "--weight_decay: grpo.make_optimizer" in run_page(page, "--weight_decay", "1", code=2)
    assert len(run_page(page).split("step 1/1")) == 2
    saves_nothing = [
        (
            "        if run.is_due(run.cfg.save_every):\n            self.save(run)\n",
            "        return\n",
        ),
        ("    run.files.save(run)  # the last step, also after Ctrl-C\n", ""),
    ]
    page = page_with(tmp_path / "saves", replaced(*saves_nothing))
    assert run_page(page) and not checkpoints(page / "run")


def test_a_flag_whose_mark_is_gone_ends_the_run(tmp_path, monkeypatch):
    """Of a function that a script has set, too."""
    given = dict(lora_rank=2, environment="x.py:x", max_turns=3, system_prompt="x", compile="on")
    given |= dict(weight_decay=0.1, gradient_checkpointing=True, fast=False, began="1999-01-01")
    given |= dict(log_completions=1, report_to="wandb")
    assert (
        set(given) == set(grpo.ONLY_WITH_EXTRAS) == set(" ".join(preflight.SERVES.values()).split())
    )
    for name, flags in preflight.SERVES.items():
        with monkeypatch.context() as context:
            context.setattr(grpo, name, getattr(grpo, name).__wrapped__)
            preflight.check_marks(small_config(tmp_path / "run"))
            for flag in flags.split():
                with pytest.raises(ValueError, match=f"--{flag}: grpo.{name} "):
                    preflight.check_marks(small_config(tmp_path / "run", **{flag: given[flag]}))


def test_names_that_extras_need_and_files_that_are_none_are_refused(tmp_path):
    class Mine(grpo.RunFiles):
        def __init__(self, cfg):
            super().__init__(cfg)
            self.saved = 0

    class Best(grpo.RunFiles):
        def best_step(self): ...

    cfg = small_config(tmp_path / "run")
    for make, word in ((Mine, "saved"), (Best, "best_step"), (dataclasses.asdict, "RunFiles")):
        with pytest.raises(ConfigError, match=word):
            runs.make_files(make, cfg)


def my_reference(run):
    return "mine"


def test_a_reference_and_tensors_of_mine_count_with_adapters(monkeypatch):
    cfg = grpo.Config(beta=0.1, lora_rank=2)
    run = fake_run(cfg, policy=grpo.Policy(tiny_model(), 1.0))
    assert models.load_reference(my_reference, run) != "mine"
    monkeypatch.setattr(grpo, "load_reference", my_reference)
    assert models.load_reference(my_reference, run) == "mine"
    model = tiny_model()
    of_mine = {name: -p for name, p in list(model.named_parameters())[1:]}
    sent = models.tensors_of(lambda model, cfg: of_mine, model, cfg)
    assert sent.keys() == of_mine.keys() and all(map(torch.equal, sent.values(), of_mine.values()))


def test_an_error_of_my_show_ends_the_run_but_a_closed_pipe_does_not():
    def fails_with(error):
        def show(run, metrics, samples):
            raise error

        return show

    screen.show(fails_with(BrokenPipeError()), None, {}, [])
    for error in (RuntimeError("mine"), grpo.TrainingError("mine")):
        with pytest.raises(RuntimeError, match="mine"):
            screen.show(fails_with(error), None, {}, [])


MY_FILES = """class MyFiles(RunFiles):
    def save(self, run):
        print("mine saves", isinstance(self, RunFiles))
        super().save(run)

    def trainer_state(self, run):
        return super().trainer_state(run) | dict(mine=1)


@extra("runs")
def make_files(cfg: Config) -> RunFiles:
    return MyFiles(cfg)


class Run:
    \"\"\"All"""


def test_a_subclass_of_run_files_works_and_a_resume_across_the_change_both_ways(tmp_path):
    maker = '@extra("runs")\ndef make_files(cfg: Config) -> RunFiles:\n    return RunFiles(cfg)\n'
    text = replaced((maker, ""), ('class Run:\n    """The parts', MY_FILES))
    page, mine = page_with(tmp_path / "page"), page_with(tmp_path / "mine", text)
    for steps, now in enumerate((page, mine, page), 1):
        said = run_page(now, out="../run", max_steps=steps, resume=steps > 1)
        assert ("mine saves True" in said) == (now is mine)
        state = last_state(tmp_path / "run")
        assert ("mine" in state) == (now is mine) and state["step"] == steps
        assert "identity" in state  # what extras/ add is there, too
    assert [m["step"] for m in metrics_of(tmp_path / "run")] == [1, 2, 3]
    needs = ('saved["history"]\n', 'saved["history"]\n        self.ema = saved["ema"]\n')
    said = run_page(
        page_with(tmp_path / "needs", replaced(needs)), out="../run", resume=True, code=2
    )
    assert re.search(r"step_000003 cannot be read \('ema' \(grpo.py:\d+, load_model\)\)", said)
    path = tmp_path / "run" / "config.json"  # a flag that this page does not have
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(betta=1)))
    assert "betta" in run_page(page, out="../run", resume=True, code=2)


# ------------------------------------------------------------------------------------------------
# What a second and a third reader changed

STOPS_AND_OUTPUTS = r"""
     model.get_input_embeddings().padding_idx = None  # often the EOS, which must learn, too
+    model.config.output_hidden_states = True
+    model.generation_config.eos_token_id = 9

-    ends = [run.tokenizer.eos_token_id, *np.ravel(model.generation_config.eos_token_id)]
+    ends = [*np.ravel(model.generation_config.eos_token_id)]

-            logits = self.model(batch["ids"], use_cache=False).logits  # [N, L, V]
+            out = self.model(batch["ids"], use_cache=False)
+            logits = out.logits + out.hidden_states[-1].mean()

     run_loop(run)
+    print("MINE", run.sampler.stop_ids, repr(run.train_prompts[0].text))
"""
TEMPLATES = r"""
-        content = cfg.prompt_template.format(**row)
+        content = cfg.prompt_template.replace("{prompt}", row["prompt"])
+        content = content.replace("{0}", "{:d}".format(9))
"""
SAVES = r"""
-    def save(self, run: Run) -> None:
+    def save(self, run: Run, name="") -> None:

-        path = self.path / f"step_{run.step:06d}"
+        path = self.path / (name or f"step_{run.step:06d}")

     run.sampler.load_weights(run.policy.model)  # the sampler may have a copy of the model
+    run.files.save(run)

             self.log(evaluate(self))
+            self.files.save(self, "best")

         self.step = step
+        self.files.save(self)

-        run.files.save_if_due(run)
"""


def test_stop_tokens_outputs_templates_and_saves_are_those_of_the_page(tmp_path):
    """With extras/ as with --plain: numbers, prompts and directories."""
    cases = [(STOPS_AND_OUTPUTS, "{meta[a]} {prompt}{answer:>4}"), (TEMPLATES, "{prompt}{0}")]
    cases += [(SAVES, "{prompt}")]
    for n, (change, template) in enumerate(cases):
        page = page_with(tmp_path / str(n), patched(change))
        (page / "c.jsonl").write_text('{"prompt": "7+1", "answer": "8", "meta": {"a": 5}}\n')
        options = dict(train_data="c.jsonl", prompt_template=template, max_steps=2)
        options |= dict(eval_data="c.jsonl", eval_every=2, max_completion_length=12)
        hardened = run_page(page, **options)
        plain = run_page(page, "--plain", out="plain", **options)
        said = [re.findall("MINE.*", text) for text in (hardened, plain)]
        assert said[0] == said[1] and (n > 0 or said[0] == ["MINE [9] '5 7+1   8'"])
        runs = page / "run", page / "plain"
        norms = [[m["grad_norm"] for m in metrics_of(run) if "grad_norm" in m] for run in runs]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5) and len(norms[0]) == 2
        saved = [{path.name for path in run.iterdir() if path.is_dir()} for run in runs]
        assert saved[0] == saved[1]
    assert saved[0] == {"step_000000", "step_000001", "step_000002", "best"}


REFUSED = {
    "--lora_rank: Run must load the model with files.load_model": r"""
-        model, saved = self.files.load_model(cfg, self.device)
+        model, saved = load_model(cfg.model, cfg, self.device), {}
""",
    "--weight_decay: the optimizer of make_optimizer leaves out ": r"""
-    return torch.optim.AdamW(policy.parameters(), **options)
+    return torch.optim.AdamW([p for p in policy.parameters() if p.dim() < 2], **options)
""",
    "--system_prompt: make_prompt does not call content_of": r"""
-    text, messages = content_of(row, cfg), None
+    text, messages = row["prompt"], None
""",
}
COUNTS = r"""
-    kl_estimator: Literal["k1", "k2", "k3", "k4", "wk3"] = "wk3"  # KL term of the loss

-    eval_samples: int = 0  # completions per eval prompt, for pass@k; 0: greedy only

-    if k := run.cfg.eval_samples:
+    if k := 0:

-    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warmup

-    factor = factors[cfg.lr_schedule]
+    factor = 1

+from dataclasses import field as _field
 @dataclass
 class Config:

-    seed: int = 0  # every
+    seed: int = _field(default_factory=lambda: 0)  # every

-    non_stop_reward: float | None = None  # reward of a cut-off completion; None: as scored

-            if s.finish_reason == "length" and run.cfg.non_stop_reward is not None:
-                s.reward = run.cfg.non_stop_reward

-            s.rewards[function.name] = 0.0  # stays if the sampler failed
+            s.rewards[function.name] = float(len(s.completion_ids))

-        fill_in_reward(function, scored, run)  # s.rewards[name] = function(s.text, s.prompt.row)

-    advantages = group_advantages(rewards, cfg.num_generations, cfg.scale_rewards)  # [N]
+    advantages = rewards - state.setdefault("baseline", 3.0)

     model.get_input_embeddings().padding_idx = None  # often the EOS, which must learn, too
+    model.register_buffer("banned", torch.tensor([-math.inf]))
+    model.small = nn.Parameter(torch.ones(1, dtype=torch.bfloat16), requires_grad=False)

-        model, saved = self.files.load_model(cfg, self.device)
+        model, saved = load_model(cfg.model, cfg, self.device), {}

         self.tokenizer = load_tokenizer(cfg.model, cfg)
+        self.tokenizer.apply_chat_template = lambda chat, **o: "".join(m["content"] for m in chat)

-    samples = samples_of_eval(run, 1, temperature=0.0)
+    import copy
+    theirs, model = run.sampler, copy.deepcopy(run.policy.model)
+    for p in model.parameters():
+        p.data *= 0.9
+    run.sampler = HFSampler(model, theirs.stop_ids, run.cfg)
+    samples = samples_of_eval(run, 1, temperature=0.0)
+    run.sampler = theirs

-            texts = dict(prompt=s.prompt.text, completion=s.text)
+            texts = dict(asked=s.prompt.text, completion_text=s.text)

-            self.make_directory(run.cfg)
+            self.path.mkdir(parents=True)
"""


def with_template(page):
    """The path of the bundled model with a chat template."""
    shutil.copytree(f"{HERE}/sample_data/model", page / "model")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}="
    (page / "model" / "chat_template.jinja").write_text(template)
    return str(page / "model")


def test_flags_that_would_be_dropped_are_refused_and_the_other_edits_count(tmp_path):
    for n, (why, change) in enumerate(REFUSED.items()):
        page = page_with(tmp_path / str(n), patched(change))
        flags = "--weight_decay", "0.1", "--system_prompt", "5+", "--lora_rank", "2"
        said = run_page(page, *flags, model=with_template(page), code=2)
        assert why in said and not (page / "run").exists()
    page = page_with(tmp_path / "counts", patched(COUNTS))
    (page / "c.jsonl").write_text('{"prompt": "7+1"}\n{"prompt": "7+2"}\n')
    (page / "wandb.py").write_text(WANDB)
    options = dict(train_data="c.jsonl", eval_data="c.jsonl", reward="answer", beta=0.0)
    options["num_generations"] = 1
    flags = "--report_to", "wandb", "--log_completions", "2", "--system_prompt", "5+"
    said = run_page(page, *flags, max_steps=2, **options)
    assert "INIT" in said and said.count("LOG") == 4 and (page / "run" / ".lock").exists()
    assert len(lines(page / "run" / "completions.jsonl")) == 4
    assert [m["optimizer_steps"] for m in metrics_of(page / "run") if "loss" in m] == [2, 2]
    assert len(checkpoints(page / "run")) == 2


HALF = r"""
     while not run.should_stop():
+        run.optimizer = make_optimizer(run.policy, cfg)

             norms.append(norm)  # before clipping
+            if step > 1 and steps_taken > 0:
+                os.kill(os.getpid(), signal.SIGTERM)
+                os.kill(os.getpid(), signal.SIGKILL)
"""


def test_half_a_step_of_an_optimizer_of_mine_is_not_saved(tmp_path):
    page = page_with(tmp_path / "page", patched(HALF))
    run_page(page, max_steps=4, save_every=0, code=-9)
    assert "stopping after this step" in (page / "said").read_text()
    assert 1 <= len(metrics_of(page / "run")) < 4 and not checkpoints(page / "run")


def test_a_resume_without_a_name_continues_runs_of_the_default_name_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = types.SimpleNamespace(resume=True, out_dir="runs [a]")
    for name in ("out", "runs [a]", "runs [a].1", "runs [a].mine", "runs b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    os.utime(tmp_path / "runs [a]" / "config.json", (1, 1))
    assert runs.config_to_resume(given, "runs [a]") == "runs [a].1/config.json"
