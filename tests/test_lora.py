"""--lora_rank: adapters and their gradient, the reference, what sampler and checkpoint get."""

import copy
import shutil
import sys

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

import grpo
import harness.checkpoints
import harness.rows
import harness.run
from grpo import Config
from harness import auto, lora, models, ranks
from harness.flags import ConfigError, TrainingError
from tests.common import (
    BUNDLED,
    CPU,
    F64,
    MODELS,
    config_of,
    copy_cut_back,
    fast_policy,
    in_bfloat16,
    leave_world,
    lines,
    logps_of,
    random_samples,
    relative,
    small_run,
    state_of,
    tiny_model,
    update_gradient,
)

pytest_plugins = "tests.common"

DENSE = [(kind, options) for kind, options in MODELS if kind != "mixtral"]
KL = dict(beta=0.1, temperature=0.8, max_grad_norm=0)


def adapted(kind="qwen2", dtype=torch.float32, zero=False, **options):
    """A tiny model with adapters of rank 4. zero: as a run begins; else they have an effect."""
    model = tiny_model(kind, dtype, **options)
    lora.add_adapters(model, Config(lora_rank=4))
    if not zero:
        move(model)
    return model


def move(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in lora.adapters(model).items():
            if ".lora_B." in name:
                p.normal_(0, 0.05)


def by_peft(dtype):
    """The same adapters on the same model, as peft makes them."""
    names = ["c_attn", "c_proj", "c_fc"] if dtype == F64 else ["q_proj", "k_proj", "v_proj"]
    if dtype != F64:
        names += ["o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=32, target_modules=names, task_type="CAUSAL_LM")
    model = get_peft_model(tiny_model(dtype=dtype), config)
    mine = lora.adapters(adapted(dtype=dtype))
    with torch.no_grad():
        for name, p in lora.adapters(model).items():
            p.copy_(mine.pop(name.removeprefix("base_model.model.")))
    assert not mine
    return model


# ------------------------------------------------------------------------------------------------
# Adapters and their gradient


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("dtype, tolerance", [(F64, 1e-12), (torch.float32, 1e-5)])
def test_the_gradient_is_that_of_peft_and_the_plain_policy(dtype, tolerance, packs):
    cfg = Config(micro_batch_tokens=40, **KL)
    samples = random_samples(12, 4)
    policy = fast_policy(adapted(dtype=dtype), cfg.temperature)
    grad, metrics = update_gradient(cfg, samples, dtype, policy=policy, packs=packs)
    plain = grpo.Policy(by_peft(dtype), cfg.temperature)
    expected, by_plain = update_gradient(cfg, samples, dtype, policy=plain)
    assert relative(grad, expected) < tolerance
    assert metrics["loss"] == pytest.approx(by_plain["loss"], rel=1e-5)


@pytest.mark.parametrize("kind, options", DENSE)
def test_all_linear_layers_but_the_head_train_and_nothing_else_does(kind, options, tmp_path):
    model = adapted(kind, zero=True, **options)
    layers = lora.adapted_layers(model)
    head = model.get_output_embeddings()
    linear = [m for m in tiny_model(kind, **options).modules() if isinstance(m, nn.Linear)]
    assert head not in layers and len(layers) == len(linear) - 1
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == set(lora.adapters(model)) and len(trained) == 2 * len(layers)

    before = {name: p.clone() for name, p in model.named_parameters()}
    cfg = Config(max_sampler_gap=1e9, learning_rate=0.01)
    policy = fast_policy(model, 1.0)
    optimizer = grpo.make_optimizer(policy, cfg)
    for _ in range(2):  # B is 0 at first, so A has no gradient
        grpo.update(policy, optimizer, random_samples(24, 4), cfg)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == trained


def test_every_rank_scales_its_product_by_32_and_draws_the_same_numbers_each_time():
    for rank in (1, 8):
        models_of_rank = [tiny_model(), tiny_model()]
        for model in models_of_rank:
            lora.add_adapters(model, Config(lora_rank=rank, seed=3))
        one, two = (lora.adapters(model) for model in models_of_rank)
        assert all(torch.equal(one[name], two[name]) for name in one)
        assert all(rank in p.shape for p in one.values())
        assert {layer.scaling["default"] for layer in lora.adapted_layers(model)} == {32 / rank}


def test_adapters_of_layers_that_text_does_not_use_are_frozen(capsys):
    """As those of a vision tower: DDP would wait for their gradients."""
    model = tiny_model()
    model.tower = nn.Linear(4, 4)
    lora.add_adapters(model, Config(lora_rank=4))
    models.freeze_unused(model, 8)
    assert "2 tensors that text does not use are frozen" in capsys.readouterr().out
    frozen = {name for name, p in lora.adapters(model).items() if not p.requires_grad}
    assert frozen == {"tower.lora_A.default.weight", "tower.lora_B.default.weight"}
    models.halve_frozen(model)
    assert all(p.dtype == torch.float32 for p in lora.adapters(model).values())
    pushed = dict(lora.merged(grpo.checkpoint_weights(model), model, torch.bfloat16))
    assert torch.equal(pushed["tower.weight"], model.tower.base_layer.weight)


def test_with_checkpointing_the_gradient_is_the_same():
    cfg = Config(micro_batch_tokens=40, **KL)
    grads = []
    for recompute in (False, True):
        model = adapted()
        if recompute:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs=dict(use_reentrant=False)
            )
        policy = fast_policy(model, cfg.temperature)
        grads.append(update_gradient(cfg, random_samples(12, 4), policy=policy)[0])
    assert grads[0].abs().max() > 0 and relative(grads[1], grads[0]) < 1e-5


@pytest.mark.slow
def test_compiled_layers_give_the_same_numbers_with_adapters_and_without(monkeypatch):
    import torch._dynamo

    compile_ = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **options: compile_(self, backend="eager", **options)
    )
    samples = random_samples(6, 3)
    with torch._dynamo.config.patch(disable=False):
        for change in (lambda model: None, lora.add_before_rounding):
            model = adapted()
            change(model)
            policy = fast_policy(model, 1.0)
            reference = lora.BasePolicy(policy)
            expected = [logps_of(p, samples)[0] for p in (policy, reference)]
            grpo.wrap(policy, Config(compile=True), CPU)
            for _ in range(2):
                with torch.no_grad():
                    base, _ = logps_of(reference, samples)
                logps, _ = logps_of(policy, samples)
                assert torch.allclose(logps, expected[0], atol=1e-5) and logps.requires_grad
                assert torch.allclose(base, expected[1], atol=1e-5)


# ------------------------------------------------------------------------------------------------
# Ranks


def gradient_on_this_rank(world):
    """With the reference's pass before it, which turns the adapters off and on."""
    policy = fast_policy(adapted(dtype=F64), KL["temperature"])
    ddp = grpo.wrap(policy, Config(), world)
    samples = random_samples(15, 5)
    cfg = Config(micro_batch_tokens=40, max_sampler_gap=1e9, **KL)
    grpo.compute_logps(lora.BasePolicy(policy), samples, "ref_logps", cfg, world)
    return update_gradient(cfg, samples, F64, ddp, policy, world)


def save_gradient(out):
    """Runs on every rank."""
    world = ranks.join_world(CPU.device)
    grad, metrics = gradient_on_this_rank(world)
    if world.rank == 0:
        torch.save((grad, metrics["loss"], metrics["kl"]), out)
    leave_world()


def test_two_ranks_have_the_gradient_of_one(fork, tmp_path):
    done = fork("tests.test_lora.save_gradient", tmp_path / "out.pt", ranks=2)[1]()
    assert done.returncode == 0, done.stderr[-3000:]
    grad, loss, kl = torch.load(tmp_path / "out.pt")
    whole, metrics = gradient_on_this_rank(CPU)
    assert relative(grad, whole) < 1e-12
    assert loss == pytest.approx(metrics["loss"], rel=1e-12)
    assert kl == pytest.approx(metrics["kl"], rel=1e-12) and kl > 0


# ------------------------------------------------------------------------------------------------
# The reference


@pytest.mark.parametrize("packs", [True, False])
def test_the_reference_is_the_model_without_adapters(packs):
    samples = random_samples(8, 4)
    expected, _ = logps_of(fast_policy(tiny_model(), 0.8), samples, packs)
    for zero in (True, False):
        policy = fast_policy(adapted(zero=zero), 0.8)
        policy.packs = packs
        reference = lora.BasePolicy(policy)
        before, _ = logps_of(policy, samples)
        assert torch.equal(logps_of(reference, samples)[0], expected)
        after, _ = logps_of(policy, samples)
        assert torch.equal(before, after) and after.requires_grad
        assert torch.equal(after, expected) is zero
        assert models.same_weights(policy.model, reference.model) is zero


def test_a_failed_pass_of_the_reference_leaves_the_adapters_on():
    model = adapted()
    with pytest.raises(KeyError), lora.adapters_off(model):
        raise KeyError
    assert all(p.requires_grad for p in lora.adapters(model).values())
    assert not any(layer.disable_adapters for layer in lora.adapted_layers(model))


def test_in_bfloat16_the_base_takes_half_and_the_numbers_stay(tmp_path):
    samples = random_samples(8, 4)
    policy = fast_policy(adapted(), 1.0)
    reference = lora.BasePolicy(policy)
    before = [in_bfloat16(p, samples)[0] for p in (policy, reference)]
    models.halve_frozen(policy.model)
    after = [in_bfloat16(p, samples)[0] for p in (policy, reference)]
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    dtypes = {name: p.dtype for name, p in policy.model.named_parameters()}
    for name, dtype in dtypes.items():
        halved = name.startswith("lm_head") or ".base_layer." in name
        assert dtype == (torch.bfloat16 if halved else torch.float32), name


@pytest.mark.parametrize("part", ["self_attn.q_proj", "mlp.up_proj"])  # with a bias, without
def test_in_bfloat16_a_small_adapter_has_its_effect(part):
    """Its products are a tenth of the distance between the numbers that they are added to. peft's
    sum loses most of them."""
    torch.manual_seed(0)
    x = torch.randn(2, 500, 64)
    model = adapted()
    models.halve_frozen(model)
    layer = model.model.layers[0].get_submodule(part)
    layer.lora_B["default"].weight.data *= 1e-3
    product = x @ layer.get_delta_weight("default").T

    def share_of_effect():
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            adapted_out = layer(x)
            with lora.adapters_off(model):
                change = adapted_out.float() - layer(x).float()
        return ((change * product).sum() / product.square().sum()).item()

    by_peft = share_of_effect()
    lora.add_before_rounding(model)
    assert by_peft < 0.6
    assert share_of_effect() == pytest.approx(1, abs=0.1)


def test_in_bfloat16_the_policy_without_an_update_is_its_reference():
    samples = random_samples(8, 4)
    policy = fast_policy(adapted(zero=True), 1.0)
    models.halve_frozen(policy.model)
    lora.add_before_rounding(policy.model)
    reference = lora.BasePolicy(policy)
    assert torch.equal(in_bfloat16(policy, samples)[0], in_bfloat16(reference, samples)[0])
    move(policy.model)
    assert not torch.equal(in_bfloat16(policy, samples)[0], in_bfloat16(reference, samples)[0])


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_the_layer_that_rounds_once_has_the_gradient_of_peft(kind):
    """In float32, in which neither rounds."""
    cfg = Config(micro_batch_tokens=40, **KL)
    grads = []
    for change in (lambda model: None, lora.add_before_rounding):
        model = adapted(kind)
        change(model)
        policy = fast_policy(model, cfg.temperature)
        grads.append(update_gradient(cfg, random_samples(12, 4), policy=policy)[0])
    assert relative(grads[1], grads[0]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("change", [lambda model: None, lora.add_before_rounding])
def test_graphs_of_one_adapted_layer_serve_all_layers(graphs, change):
    """With and without the adapters: policy and reference."""
    counts = []
    for layers in (2, 4):
        graphs.clear()
        model = adapted(num_hidden_layers=layers)
        change(model)
        policy = fast_policy(model, 1.0)
        reference = lora.BasePolicy(policy)
        samples = random_samples(6, 3)
        expected = [logps_of(side, samples)[0] for side in (policy, reference)]
        grpo.wrap(policy, Config(compile=True, lora_rank=4), CPU)
        for _ in range(2):
            for side, logps in zip((policy, reference), expected, strict=True):
                assert torch.allclose(logps_of(side, samples)[0], logps, atol=1e-5)
        counts.append(len(graphs))
        torch._dynamo.reset()
    assert 0 < counts[0] == counts[1]


def test_a_run_starts_at_its_reference_and_leaves_it(tmp_path):
    for dtype in ("float32", "bfloat16"):
        out = tmp_path / dtype
        steps = small_run(out, lora_rank=4, beta=0.1, num_minibatches=1, dtype=dtype)
        assert steps[0]["kl"] == 0 and steps[-1]["kl"] > 0
        assert steps[0]["optimizer_steps"] == 1


# ------------------------------------------------------------------------------------------------
# What sampler and checkpoint get


def merged_by_peft(model, kind="qwen2", **options):
    """A plain model with the adapters of `model` in its weights."""
    with_adapters = get_peft_model(tiny_model(kind, **options), model.peft_config["default"])
    state = {f"base_model.model.{name}": p for name, p in lora.adapters(model).items()}
    assert not with_adapters.load_state_dict(state, strict=False).unexpected_keys
    return with_adapters.merge_and_unload()


@pytest.mark.parametrize("kind, options", DENSE)
def test_the_sampler_gets_the_merged_weights_under_their_names(kind, options):
    model = adapted(kind, **options)
    before = copy.deepcopy(model.state_dict())
    pushed = dict(lora.merged(grpo.checkpoint_weights(model), model))
    expected = grpo.checkpoint_weights(merged_by_peft(model, kind, **options))
    assert pushed.keys() == expected.keys()
    for name, tensor in pushed.items():
        assert torch.allclose(tensor, expected[name], atol=1e-6, rtol=0), name
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_adapters_are_added_in_float32_whatever_the_base_is_in():
    model = adapted()
    models.halve_frozen(model)
    for layer in lora.adapted_layers(model):
        product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        weight = layer.base_layer.weight
        tensor = merged_weight(layer)
        assert weight.dtype == torch.bfloat16 and tensor.dtype == torch.float32
        assert torch.allclose(tensor, weight.float() + 32 / 4 * product, atol=1e-7)


def merged_weight(layer, dtype=torch.float32):
    model = nn.ModuleList([layer])
    model.device = CPU.device
    [(_, tensor)] = lora.merged(dict(weight=layer.base_layer.weight), model, dtype)
    return tensor


def test_a_sampler_in_bfloat16_follows_adapters_that_rounding_would_remove():
    """A base of 1 and products of a tenth of the distance to the next number in bfloat16."""
    layer = lora.adapted_layers(adapted(vocab_size=64))[0]
    step = 2.0**-7
    with torch.no_grad():
        layer.base_layer.weight.fill_(1)
        layer.lora_A["default"].weight.fill_(1)
        layer.lora_B["default"].weight.fill_(0.1 * step / 32)  # 32 / rank times rank products
    tensor = merged_weight(layer, torch.bfloat16)
    assert tensor.dtype == torch.bfloat16
    assert (merged_weight(layer).bfloat16() == 1).all()
    assert set(tensor.float().unique().tolist()) == {1.0, 1 + step}
    assert (tensor.float() > 1).double().mean().item() == pytest.approx(0.1, abs=0.02)  # of 4,096
    assert torch.equal(merged_weight(layer, torch.bfloat16), tensor)  # a resume pushes it again
    with torch.no_grad():
        layer.lora_B["default"].weight.zero_()
    assert (merged_weight(layer, torch.bfloat16) == 1).all()


def test_a_layer_that_was_lost_on_the_way_is_an_error():
    model = adapted()
    weights = grpo.checkpoint_weights(model)
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(TrainingError, match="1 adapted layers of this model do not appear"):
        dict(lora.merged(weights, model))


@pytest.mark.parametrize("kind, options", DENSE)
def test_a_checkpoint_needs_no_peft_and_its_adapters_load_with_peft(kind, options, tmp_path):
    model = adapted(kind, **options)
    path = str(tmp_path / "saved")
    tokenizer = harness.rows.load_tokenizer(BUNDLED)
    harness.checkpoints.model_writer(model, tokenizer, path)(path)
    attention = dict(attn_implementation=model.config._attn_implementation)
    loaded, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **attention)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.arange(2, 20)[None]
    expected = model(ids).logits
    assert torch.allclose(loaded(ids).logits, expected, atol=1e-4)

    base = tiny_model(kind, **options)
    by_peft = PeftModel.from_pretrained(base, f"{path}/adapter").eval()
    assert torch.equal(by_peft(ids).logits, expected)
    restored = adapted(kind, zero=True, **options)
    lora.load_adapters(restored, path)
    for name, p in lora.adapters(restored).items():
        assert torch.equal(p, lora.adapters(model)[name])


@pytest.mark.slow
def test_vllm_samples_from_base_and_adapters(fork, tmp_path):
    """A wrong push would stop the run: the gap may be 1e-4 at most."""
    args = ["--rollout", "vllm", "--lora_rank", 4, "--max_steps", 3, "--num_prompts", 4]
    args += ["--eval_data", "", "--learning_rate", 1e-2, "--out_dir", tmp_path / "out"]
    done = fork("command_line", *args)[1]()
    assert done.returncode == 0, done.stderr[-3000:]
    steps = lines(tmp_path / "out" / "metrics.jsonl")
    assert len(steps) == 3 and steps[-1]["kl"] > 1e-3


# ------------------------------------------------------------------------------------------------
# Runs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resume_has_the_same_bits(tmp_path, dtype):
    options = dict(lora_rank=4, beta=0.1, dtype=dtype, learning_rate=1e-2)
    whole = tmp_path / "whole"
    small_run(whole, **options)
    cut = tmp_path / "cut"
    copy_cut_back(whole, cut, 2)
    small_run(cut, **options, resume="latest")
    assert state_of(cut) == state_of(whole)
    name = "step_000004/adapter/adapter_model.safetensors"
    assert (cut / name).read_bytes() == (whole / name).read_bytes()
    first = whole / "step_000001" / "adapter" / "adapter_model.safetensors"
    assert first.read_bytes() != (whole / name).read_bytes()


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    out = tmp_path_factory.mktemp("lora") / "out"
    small_run(out, lora_rank=4, max_steps=2)
    return out


def test_a_changed_byte_of_the_adapters_is_found(short, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(short, out)
    path = out / "step_000002" / "adapter" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    small_run(out, resume="latest", max_steps=2, train_data=str(short.parent / "rows.jsonl"))
    assert "adapter_model.safetensors is damaged" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        (dict(lora_rank=8), "--lora_rank 8: .*step_000002 has 4; to change it"),
        (dict(lora_rank=0), "--lora_rank 0: .*step_000002 has 4; to change it"),
        (dict(beta=0.0), "--model .*: not the weights that this run began with, and to which"),
    ],
)
def test_a_resume_with_another_rank_or_base_is_refused(short, tmp_path, flags, message):
    if "lora_rank" not in flags:
        flags["model"] = str(short / "step_000001")
    rows = str(short.parent / "rows.jsonl")
    with pytest.raises(ConfigError, match=message):
        small_run(tmp_path / "out", resume=str(short / "step_000002"), train_data=rows, **flags)


def test_a_checkpoint_is_a_model_to_begin_with(short, tmp_path):
    rows = str(short.parent / "rows.jsonl")
    [step] = small_run(
        tmp_path / "out", model=str(short / "step_000002"), train_data=rows, max_steps=1
    )
    assert step["optimizer_steps"] == 2


def test_the_learning_rate_is_ten_times_as_high_unless_it_is_given(short, capsys):
    given = ["--model", "m", "--train_data", "rows"]
    assert grpo.parse_args(given).learning_rate == 1e-6
    assert capsys.readouterr().out == ""
    assert grpo.parse_args([*given, "--lora_rank", "1"]).learning_rate == 1e-5
    said = "--learning_rate 1e-05 (ten times the default, for --lora_rank)\n"
    assert capsys.readouterr().out == said
    bundled = grpo.parse_args(["--lora_rank", "1"])
    assert bundled.learning_rate == 3e-3
    capsys.readouterr()
    assert grpo.prepare(bundled).learning_rate == 3e-3  # not ten times once more
    mine = grpo.parse_args([*given, "--lora_rank", "1", "--learning_rate", "1e-6"])
    assert mine.learning_rate == 1e-6
    with pytest.raises(ConfigError, match="--lora_rank many: must be a whole number"):
        grpo.prepare(Config(lora_rank="many"))
    assert config_of(short)["learning_rate"] == 3e-4  # small_run() gives it
    assert grpo.parse_args(["--resume", str(short)]).learning_rate == 3e-4
    assert capsys.readouterr().out == ""


def test_what_cannot_have_adapters_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="--lora_rank 2: the experts of this model"):
        lora.add_adapters(tiny_model("mixtral"), Config(lora_rank=2))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match="--lora_rank 2: .*peft.*; pip install peft"):
        lora.add_adapters(tiny_model(), Config(lora_rank=2))


# ------------------------------------------------------------------------------------------------
# The plan of the memory

QWEN = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, vocab_size=151936)
COUNTED = {  # GB of an update of 0.5B by studies/memory.py: tokens, recomputed
    (2048, False): 6.97,
    (8192, False): 17.09,
    (2048, True): 3.84,
    (8192, True): 4.63,
}


def test_the_memory_plan_is_what_was_counted_and_not_less():
    heads = dict(num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**QWEN, **heads))
    cfg = Config(lora_rank=16, dtype="bfloat16", beta=0.1)
    full = auto.peak_bytes(Config(dtype="bfloat16"), model, 2048, True)
    lora.add_adapters(model, cfg)
    for (tokens, recompute), counted in COUNTED.items():
        planned = (auto.peak_bytes(cfg, model, tokens, recompute) - auto.CUDA) / 1e9
        assert counted <= planned < 1.2 * counted, (tokens, recompute)
    assert auto.peak_bytes(cfg, model, 2048, True) < full / 1.8
    embedding = model.get_input_embeddings().weight.numel()
    linear = sum(p.numel() for p in model.parameters() if not p.requires_grad) - embedding
    in_float32 = Config(lora_rank=16, dtype="float32")
    difference = auto.resident_bytes(in_float32, model) - auto.resident_bytes(cfg, model)
    assert difference == 2 * linear


def test_room_is_asked_for_what_a_checkpoint_takes(tmp_path, monkeypatch):
    """Merged in float32, whatever the base is in; and Adam's moments of the adapters."""
    model = adapted()
    models.halve_frozen(model)
    sizes = []
    monkeypatch.setattr(harness.run, "try_checkpoint", lambda *args: sizes.append(args[-1]))
    run = harness.run.Run(Config(model="m", out_dir=str(tmp_path / "out")), CPU, None, 0.0)
    run.track(model, torch.optim.AdamW(model.parameters()), None, 0)
    run.exits.close()
    trained = sum(p.numel() for p in lora.adapters(model).values())
    plain = sum(p.numel() for p in tiny_model().parameters())
    assert sizes == [4 * plain + 3 * 4 * trained]
