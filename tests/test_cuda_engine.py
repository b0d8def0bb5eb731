"""An engine that keeps vLLM's rules of order, on a CUDA device that is not there."""

import importlib.util
import inspect
import json
import math
import sys
import types

import pytest
import torch

import grpo
from grpo import Config
from harness.ranks import World
from tests.common import BUNDLED, PRIME, command_line, ids_of, lines, run
from tests.on_cuda import CUDA, NO_STANDIN, SHORT, on_cuda

pytestmark = NO_STANDIN


class Engine:
    """vllm.LLM on a CUDA card, as far as the trainer uses it.

    It has a model of its own, samples slowly, and raises if calls do not come in vLLM's order.
    """

    def __init__(
        self, model, *, dtype, seed=0, enable_sleep_mode=False, load_format="auto", **options
    ):
        from transformers import AutoConfig, AutoModelForCausalLM

        assert (
            enable_sleep_mode
            and load_format == "dummy"
            and options["logprobs_mode"] == "processed_logprobs"
        )
        self.model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model), dtype=dtype
        )
        self.model.eval().to("cuda")
        self.awake, self.loaded, self.fresh, self.calls = {"weights", "kv_cache"}, False, True, []
        self.llm_engine = types.SimpleNamespace(
            engine_core=types.SimpleNamespace(shutdown=lambda: None)
        )

    def rule(self, name, holds, why):
        self.calls.append(name)
        assert holds, f"{name}: {why} (after {self.calls[-6:-1]})"

    def apply_model(self, func):
        self.rule("apply_model", "weights" in self.awake, "the weights sleep")
        return [func(self.model)]

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        assert method == "reload_weights" and list(kwargs) == ["weights_iterator"]
        self.rule("reload", "weights" in self.awake, "writes into memory that was given away")
        first = "reload" not in self.calls[:-1]
        self.rule(
            "reload", first or "kv_cache" not in self.awake, "its peak meets that of the cache"
        )
        weights = {name: weight.cpu() for name, weight in kwargs["weights_iterator"]}
        options = dict(config=self.model.config, dtype=self.model.dtype, output_loading_info=True)
        read, found = type(self.model).from_pretrained(None, state_dict=weights, **options)
        assert not found["missing_keys"] and not found["unexpected_keys"], found
        self.model.load_state_dict(read.state_dict())
        self.loaded, self.fresh = True, False
        return [None]

    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        self.rule("reset", self.loaded, "before the weights that it is for")
        self.fresh = True
        return True

    def wake_up(self, tags=None):
        tags = set(tags or ("weights", "kv_cache"))
        self.rule(f"wake_up {tags}", not tags & self.awake, "is awake")
        self.rule(
            f"wake_up {tags}", tags == {"weights"} or self.loaded, "the cache before the weights"
        )
        self.awake |= tags

    def sleep(self, level=1, mode="abort"):
        self.rule("sleep", self.awake == {"weights", "kv_cache"}, "is not wholly awake")
        slopes = [m.impl.alibi_slopes for m in self.model.modules() if hasattr(m, "impl")]
        with torch.no_grad():
            for tensor in [*self.model.parameters(), *slopes] if level == 2 else []:
                # dropped; level 1 brings all of it back, and vLLM keeps buffers in both
                tensor.fill_(math.nan)
        self.awake, self.loaded = set(), False

    @torch.no_grad()
    def generate(
        self,
        prompts,
        sampling_params=None,
        *,
        use_tqdm=True,
        lora_request=None,
        priority=None,
        tokenization_kwargs=None,
        mm_processor_kwargs=None,
    ):
        self.rule(
            "generate",
            self.awake == {"weights", "kv_cache"},
            "hangs for ever: the scheduler waits for a wake-up",
        )
        self.rule("generate", self.loaded and self.fresh, "samples from old weights or old keys")
        return [
            self.answer(p["prompt_token_ids"], s)
            for p, s in zip(prompts, sampling_params, strict=True)
        ]

    def answer(self, prompt, params):
        outputs = []
        for i in range(params.n):
            generator, ids, logprobs = (
                torch.Generator().manual_seed(params.seed % 2**63 + i),
                list(prompt),
                [],
            )
            while len(logprobs) < params.max_tokens and (
                not logprobs or ids[-1] not in params.stop_token_ids
            ):
                logits = self.model(torch.tensor([ids], device="cuda")).logits[0, -1].float().cpu()
                logps = (logits / (params.temperature or 1.0)).log_softmax(-1)
                drawn = (
                    logps.argmax()
                    if params.temperature == 0
                    else logps.exp().multinomial(1, generator=generator)
                )
                ids.append(int(drawn))
                logprobs.append(float(logps[ids[-1]]))
            completion, stopped = ids[len(prompt) :], ids[-1] in params.stop_token_ids
            flat = types.SimpleNamespace(token_ids=completion, logprobs=logprobs)
            reason = "stop" if stopped else "length"
            outputs.append(
                types.SimpleNamespace(token_ids=completion, logprobs=flat, finish_reason=reason)
            )
        return types.SimpleNamespace(outputs=outputs)


def engines():
    """What `import vllm` finds from now on; the list of the engines that are made."""
    made = []
    vllm, platforms = types.ModuleType("vllm"), types.ModuleType("vllm.platforms")
    vllm.LLM = lambda **options: made.append(Engine(**options)) or made[-1]
    vllm.SamplingParams = types.SimpleNamespace
    platforms.current_platform = types.SimpleNamespace(device_type="cuda")
    sys.modules |= {"vllm": vllm, "vllm.platforms": platforms}
    return made


def with_engine(*args):
    """The command line where `import vllm` finds the engine."""
    made, code = engines(), 1
    try:
        command_line(*args)
    except SystemExit as stop:
        code = stop.code
    assert code == 0
    print(
        "calls:",
        *(call for engine in made for call in engine.calls if call != "apply_model"),
        sep="\n",
    )


@pytest.mark.slow
def test_the_engine_sleeps_wakes_and_is_loaded_in_the_order_of_vllm(tmp_path):
    options = [
        *PRIME,
        *SHORT,
        "--device",
        "cuda",
        "--rollout",
        "vllm",
        "--out_dir",
        tmp_path / "out",
    ]
    shown = on_cuda("tests.test_cuda_engine.with_engine", *options)
    calls = list(dict.fromkeys(shown.partition("calls:\n")[2].splitlines()))
    assert calls == [
        "reload",
        "reset",
        "generate",
        "sleep",
        "wake_up {'weights'}",
        "wake_up {'kv_cache'}",
    ]
    metrics = lines(tmp_path / "out" / "metrics.jsonl")
    assert len(metrics) == 2 and all(
        m["sampler_gap"] < 0.02 and m["grad_norm"] > 0 for m in metrics
    )


WRONG = {
    "generate": "hangs for ever",
    "wake_up weights, wake_up kv_cache": "the cache before the weights",
    "reload": "given away",
    "wake_up weights, reload, wake_up kv_cache, generate": "old keys",
    "wake_up weights, sleep": "not wholly awake",
}


@pytest.mark.parametrize("order", WRONG)
def test_the_engine_refuses_another_order(order, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_: self)
    options = dict(
        dtype=torch.float32,
        enable_sleep_mode=True,
        load_format="dummy",
        logprobs_mode="processed_logprobs",
    )
    engine = Engine(model=BUNDLED.model, **options)
    weights = [(name, p.detach().clone()) for name, p in engine.model.named_parameters()]

    def reload():
        engine.collective_rpc("reload_weights", kwargs=dict(weights_iterator=iter(weights)))

    reload()
    engine.reset_prefix_cache()
    engine.sleep(level=2)
    with pytest.raises(AssertionError, match=WRONG[order]):
        for call in order.split(", "):
            name, _, tag = call.partition(" ")
            if name == "generate":
                engine.generate([], [])
            elif name == "reload":
                reload()
            elif name == "sleep":
                engine.sleep(level=2)
            else:
                engine.wake_up(tags=[tag])


@pytest.mark.parametrize("alibi", [False, True])
def test_what_is_no_parameter_outlives_a_sleep(alibi, tmp_path, monkeypatch):
    """Buffers, such as a router's, are pushed with the weights; ALiBi's slopes, which no push
    brings, are kept."""
    from transformers import AutoModelForCausalLM, Glm4MoeConfig

    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_: self)
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=Engine, SamplingParams=None))
    monkeypatch.setitem(sys.modules, "vllm.platforms", types.SimpleNamespace(current_platform=None))
    sizes = dict(
        hidden_size=8,
        intermediate_size=8,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        vocab_size=9,
    )
    sizes |= dict(
        num_attention_heads=1, num_key_value_heads=1, n_routed_experts=2, num_experts_per_tok=1
    )
    config = Glm4MoeConfig(**sizes, first_k_dense_replace=0)
    config.save_pretrained(tmp_path)
    sampler = grpo.VLLMSampler(
        [1], 9, Config(model=str(tmp_path), dtype="float32"), World(0, 1, CUDA)
    )
    model = AutoModelForCausalLM.from_config(config)
    theirs, ours = (m.model.layers[0].mlp for m in (sampler.llm.model, model))
    theirs.gate.e_score_correction_bias.fill_(math.nan)
    if alibi:
        theirs.impl = types.SimpleNamespace(alibi_slopes=torch.ones(4))
    sampler.push(model)
    sampler.sleep()
    assert theirs.experts.down_proj.isnan().any() != alibi
    ours.gate.e_score_correction_bias += 1
    sampler.push(model)
    for name, weight in model.state_dict().items():
        assert torch.equal(sampler.llm.model.state_dict()[name], weight), name
    assert not alibi or theirs.impl.alibi_slopes.tolist() == [1.0] * 4


def signatures(path):
    """What the installed vllm says of itself."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def names(function):
        return list(inspect.signature(function).parameters)

    found = {name: names(getattr(vllm.LLM, name)) for name in CALLS}
    found |= dict(
        LLM=names(vllm.LLM) + names(EngineArgs), SamplingParams=names(vllm.SamplingParams)
    )
    found |= dict(reload_weights=names(GPUModelRunner.reload_weights))
    with open(path, "w") as file:
        json.dump(found, file)


CALLS = ("apply_model", "collective_rpc", "reset_prefix_cache", "wake_up", "sleep", "generate")


@pytest.mark.slow
def test_the_engine_has_the_signatures_of_vllm(tmp_path, monkeypatch):
    if not importlib.util.find_spec("vllm"):
        pytest.skip("vllm is not installed")
    code = f"from tests.test_cuda_engine import signatures; signatures({str(tmp_path / 'found')!r})"
    assert run("-c", code).returncode == 0
    found = json.loads((tmp_path / "found").read_text())
    for name in CALLS:
        assert list(inspect.signature(getattr(Engine, name)).parameters) == found[name]
    assert "weights_iterator" in found["reload_weights"]
    asked = {}  # by the trainer
    vllm = types.ModuleType("vllm")
    vllm.LLM = lambda **options: (
        asked.update(LLM=options) or types.SimpleNamespace(apply_model=lambda _: None)
    )
    vllm.SamplingParams = lambda **options: asked.update(SamplingParams=options)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.platforms", types.SimpleNamespace(current_platform=None))
    monkeypatch.setenv("RANK", "0")
    sampler = grpo.VLLMSampler([1], 9, Config(model="m", dtype="bfloat16"), World(0, 1, CUDA))
    sampler.llm.generate = lambda *_, **__: []
    sampler.generate([ids_of([2])], 1, [0], 1.0)
    for name, options in asked.items():
        assert set(options) <= set(found[name])
