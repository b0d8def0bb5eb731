"""What makes the policy fast changes no number: the head in tiles, packed rows, their attention."""

import types

import numpy as np
import pytest
import torch

import grpo
import harness.arrays
import harness.attention
import harness.check
import harness.head
import harness.packing
from grpo import Config, Prompt, Sample
from tests.common import (
    CPU,
    F64,
    MODELS,
    fast_policy,
    ids_of,
    in_bfloat16,
    logps_of,
    random_samples,
    relative,
    tiny_model,
    update_gradient,
)

pytest_plugins = "tests.common"


def gradient_of(loss, inputs):
    """[P]: the gradients by all inputs, one after another."""
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, inputs)])


# ------------------------------------------------------------------------------------------------
# The output head in tiles


def set_tiles(monkeypatch, logits, kept=0):
    """Tiles of so many logits, of which forward keeps `kept` for backward."""
    monkeypatch.setitem(harness.head.HEAD_TILE, "cpu", logits)
    monkeypatch.setattr(harness.head, "HEAD_KEPT", kept)


def head_inputs(frozen=False, with_bias=False):
    """n 10, H 5, V 7"""
    hidden = torch.randn(10, 5, dtype=F64, requires_grad=True)
    weight = torch.randn(7, 5, dtype=F64, requires_grad=not frozen)
    bias = torch.randn(7, dtype=F64, requires_grad=True) if with_bias else None
    temperature = 0.7
    return hidden, weight, bias, torch.randint(0, 7, (10,)), temperature


def plain_logps(hidden, weight, bias, targets, temperature):
    logps = (torch.nn.functional.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    entropy = -(logps.exp() * logps).sum(-1)
    return logps.gather(-1, targets[:, None])[:, 0], entropy


COLUMNS_AND_KEPT = [(1, 0), (2, 0), (3, 60), (4, 0), (6, 0), (7, 0), (100, 0)]


@pytest.mark.parametrize("columns, kept", COLUMNS_AND_KEPT)
@pytest.mark.parametrize("frozen, with_bias", [(False, False), (False, True), (True, False)])
def test_gradient_of_the_head_in_tiles(frozen, with_bias, columns, kept, monkeypatch):
    set_tiles(monkeypatch, 10 * columns, kept)
    inputs = head_inputs(frozen, with_bias)
    assert torch.autograd.gradcheck(lambda *x: harness.head.HeadLogps.apply(*x)[0], inputs)
    logps, entropy = harness.head.HeadLogps.apply(*inputs)
    expected_logps, expected_entropy = plain_logps(*inputs)
    assert not entropy.requires_grad
    assert torch.allclose(logps, expected_logps, atol=1e-12)
    assert torch.allclose(entropy, expected_entropy, atol=1e-12)


def test_the_heads_gradient_is_added_to_an_earlier_one_in_place(monkeypatch):
    """By loss.backward() only: torch.autograd.grad returns it and leaves .grad as it is."""
    set_tiles(monkeypatch, 20)
    hidden, weight, *rest = head_inputs()

    def loss(weight=weight):
        return harness.head.HeadLogps.apply(hidden, weight, *rest)[0].sum()

    expected = torch.autograd.grad(plain_logps(hidden, weight, *rest)[0].sum(), (hidden, weight))
    for gradient, other in zip(
        torch.autograd.grad(loss(), (hidden, weight)), expected, strict=True
    ):
        assert relative(gradient, other) < 1e-12
    assert weight.grad is None

    loss().backward()
    first = weight.grad
    (loss() + loss()).backward()
    assert weight.grad is first
    assert relative(first, 3 * expected[1]) < 1e-12

    for inputs, other in zip((hidden, weight), expected, strict=True):
        [gradient] = torch.autograd.grad(loss(), inputs)
        assert relative(gradient, other) < 1e-12
    assert weight.grad is first
    assert relative(first, 3 * expected[1]) < 1e-12


def test_the_heads_gradient_reaches_a_weight_that_is_computed(monkeypatch):
    """A merged adapter has no .grad of its own; a saved tensor may come back as another one."""
    set_tiles(monkeypatch, 20)
    hidden, weight, *rest = head_inputs()
    head = harness.head.HeadLogps.apply
    [expected] = torch.autograd.grad(plain_logps(hidden, 2 * weight, *rest)[0].sum(), weight)
    head(hidden, 2 * weight, *rest)[0].sum().backward()
    assert relative(weight.grad, expected) < 1e-12

    weight.grad = None
    [expected] = torch.autograd.grad(plain_logps(hidden, weight, *rest)[0].sum(), weight)
    with torch.autograd.graph.save_on_cpu():
        loss = head(hidden, weight, *rest)[0].sum()
    loss.backward()
    assert relative(weight.grad, expected) < 1e-12


@pytest.mark.parametrize("tied", [True, False])
def test_the_tiles_change_nothing(tied, monkeypatch):
    """Against the model's own logits; a tied weight has a gradient as the embedding, too."""
    samples = random_samples(9, 3)
    cfg = Config(beta=0.1, micro_batch_tokens=30)  # several micro-batches
    policy = fast_policy(tiny_model(tie_word_embeddings=tied), 1.0)
    policy.plain_head = False
    expected, metrics = update_gradient(cfg, samples, policy=policy)
    policy.plain_head = True
    for logits in (32 * 5, 2**22):
        set_tiles(monkeypatch, logits)
        gradient, same = update_gradient(cfg, samples, policy=policy)
        assert relative(gradient, expected) < 1e-6
        assert same["entropy"] == pytest.approx(metrics["entropy"], rel=1e-6)


@pytest.mark.parametrize("kind, options", MODELS)
def test_a_tied_embedding_adds_its_rows_to_the_heads_gradient(kind, options):
    """The only gradient of [V, H] is dense."""
    policy = fast_policy(tiny_model(kind, **options), 0.7)
    embedding = policy.model.get_input_embeddings()
    tied = embedding.weight is policy.model.get_output_embeddings().weight
    cfg = Config(micro_batch_tokens=40, max_grad_norm=0, beta=0.0)
    before, _ = update_gradient(cfg, random_samples(11, 4), policy=policy)
    grpo.wrap(policy, cfg, CPU)
    after, _ = update_gradient(cfg, random_samples(11, 4), policy=policy)
    assert embedding.sparse == (tied and policy.plain_head)
    assert relative(after, before) < 1e-6


def test_the_entropy_is_computed_in_float32():
    torch.manual_seed(0)
    hidden = torch.randn(30, 64)
    weight = torch.randn(5000, 64) * 0.3
    targets = torch.zeros(30, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16):
        _, entropy = harness.head.HeadLogps.apply(hidden, weight, None, targets, 1.0)
        logits = torch.nn.functional.linear(hidden, weight)
    logps = logits.double().log_softmax(-1)
    expected = -(logps.exp() * logps).sum(-1)
    assert logits.dtype == torch.bfloat16 and expected.std() > 0.1
    assert (entropy - expected).abs().max() < 1e-5


def cosine(a, b):
    return (a @ b / (a.norm() * b.norm())).item()


@pytest.mark.parametrize("how", ["plain", "packed", "checkpointed", "own logits"])
def test_backward_takes_its_dtype_from_forward(how):
    """It runs outside the autocast block, where CUDA's default is float16: in that a gradient
    over n_tokens would underflow."""
    policy = fast_policy(tiny_model(), 1.0)
    policy.plain_head = how != "own logits"
    if how == "checkpointed":
        recompute(policy.model)
    samples = random_samples(40, 4)
    body = [p for name, p in policy.model.named_parameters() if "lm_head" not in name]
    advantages = torch.tensor([s.advantages[0] for s in samples])[:, None]
    default = torch.get_autocast_dtype("cpu")
    gradients = []
    for forward, n_tokens in ((logps_of, 1), (in_bfloat16, 1e4), (in_bfloat16, 1e6)):
        logps, _ = forward(policy, samples, how == "packed")
        try:
            torch.set_autocast_dtype("cpu", torch.float16)
            gradients.append(gradient_of((logps * advantages).sum() / n_tokens, body))
        finally:
            torch.set_autocast_dtype("cpu", default)
    assert all(cosine(g, gradients[0]) > 0.999 for g in gradients)


# ------------------------------------------------------------------------------------------------
# Rows without padding


def sample_of(group, prompt, completion):
    return Sample(group, Prompt(ids_of(prompt), "", {}), ids_of(completion), None, "")


def test_the_layout_of_a_packed_row():
    """The example of packed_layout, and what each of its tokens sees: its prompt and its past."""
    letters = "ABCXYdefghz"
    samples = []
    for group, prompt, completion in ((0, "ABC", "def"), (0, "ABC", "gh"), (1, "XY", "z")):
        prompt_ids = [letters.index(letter) for letter in prompt]
        samples.append(sample_of(group, prompt_ids, [letters.index(x) for x in completion]))
    layout = harness.packing.packed_layout(samples)
    row = [letters[i] for i in layout["ids"][0]]
    assert row == list("ABCXYdeg")
    assert layout["positions"].tolist() == [[0, 1, 2, 0, 1, 3, 4, 3]]
    assert [letters[i] for i in layout["targets"]] == list("defghz")
    assert layout["read"].tolist() == [2, 5, 6, 2, 7, 4]
    assert layout["place"].tolist() == [0, 1, 2, 3, 4, 6]
    assert layout["shape"] == (3, 3)

    seen = []  # by each query, padding included
    for block in layout["blocks"]:
        queries = block["query_positions"][:, :, None]
        visible = block["key_positions"][:, None] <= queries  # [N, T, K]
        for n, t in np.ndindex(block["queries"].shape):
            seen.append("".join(row[place] for place in block["keys"][n][visible[n, t]]))
    assert [seen[i] for i in layout["outputs"]] == [
        "A",
        "AB",
        "ABC",
        "X",
        "XY",
        "ABCd",
        "ABCde",
        "ABCg",
    ]

    # Longest first in the row, and yet each at its own place in the table.
    backwards = harness.packing.packed_layout(samples[::-1])
    assert backwards["place"].tolist() == [6, 7, 8, 3, 4, 0]


@pytest.mark.parametrize(
    "lengths, shapes",
    [
        ([3, 40, 2, 4, 38, 1, 3, 2], [((2, 39), 42), ((6, 3), 6)]),
        ([1, 30, 1, 1], [((1, 29), 32)]),  # nothing follows the others
        ([9, 10, 8, 10], [((4, 9), 12)]),  # next to nothing to save
        ([1, 1], []),
    ],
)
def test_completions_of_unlike_lengths_attend_in_two_blocks(lengths, shapes):
    """What pads a block is computed, too, so long ones attend apart from short ones."""
    samples = []
    for i, n in enumerate(lengths, 1):
        samples.append(sample_of(0, [1, 2, 3], range(100 * i, 100 * i + n)))
    layout = harness.packing.packed_layout(samples)
    _, *blocks = layout["blocks"]
    assert [(block["queries"].shape, block["keys"].shape[1]) for block in blocks] == shapes
    queries = np.concatenate([block["queries"].flatten() for block in layout["blocks"]])
    in_row = queries[layout["outputs"]]
    assert np.array_equal(in_row, np.arange(3 + sum(lengths) - len(lengths)))

    # The token before each completion token, in the order in which the samples were given.
    expected = [[3, *s.completion_ids[:-1]] for s in samples]
    table = np.zeros(layout["shape"], np.int64)
    table.flat[layout["place"]] = layout["ids"][0, layout["read"]]
    assert np.array_equal(table, harness.arrays.padded(expected, np.int64))


@pytest.mark.parametrize("kind, options", MODELS)
def test_a_shared_prompt_changes_no_log_probability_and_no_gradient(kind, options):
    policy = fast_policy(tiny_model(kind, **options), 0.7)
    parameters = list(policy.parameters())
    samples = random_samples(11, 4)  # prompts of many lengths; mixed up, as a mini-batch is
    samples = [samples[i] for i in np.random.default_rng(0).permutation(11)]
    logps, entropy = logps_of(policy, samples, packs=False)
    packed_logps, packed_entropy = logps_of(policy, samples, packs=True)
    assert torch.allclose(logps, packed_logps, atol=2e-5)
    assert torch.allclose(entropy, packed_entropy, atol=2e-5)
    expected = gradient_of((logps**2).sum(), parameters)
    assert relative(gradient_of((packed_logps**2).sum(), parameters), expected) < 1e-5

    one_token = [sample_of(s.group, s.prompt.ids, s.completion_ids[:1]) for s in samples]
    for s in one_token:  # the row holds prompts only
        s.sampler_logps = np.zeros(1, np.float32)
    logps, _ = logps_of(policy, one_token, packs=False)
    packed_logps, _ = logps_of(policy, one_token, packs=True)
    assert torch.allclose(logps, packed_logps, atol=2e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_by_products_is_attention(masked):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    generator = torch.Generator().manual_seed(0)
    T, K = (5, 7) if masked else (6, 6)
    query = torch.randn(3, 6, T, 8, generator=generator, dtype=F64, requires_grad=True)
    key = torch.randn(3, 2, K, 8, generator=generator, dtype=F64, requires_grad=True)
    value = torch.randn(3, 2, K, 8, generator=generator, dtype=F64, requires_grad=True)
    mask = None
    if masked:
        seen = torch.rand(3, 1, T, K, generator=generator) < 0.7
        mask = torch.where(seen, 0.0, -torch.inf).to(F64)
    layer = types.SimpleNamespace(num_key_value_groups=3, is_causal=True)
    outs, gradients = [], []
    for attend in (harness.attention.attention_by_products, sdpa_attention_forward):
        out, _ = attend(layer, query, key, value, mask, scaling=0.3)
        outs.append(out)
        gradients.append(gradient_of(out.square().sum(), (query, key, value)))
    assert relative(*outs) < 1e-12
    assert relative(*gradients) < 1e-12


# ------------------------------------------------------------------------------------------------
# The plain policy and the fast one


@pytest.mark.parametrize("kind, options", MODELS)
@pytest.mark.parametrize("packs", [True, False])
def test_the_plain_policy_has_the_same_gradient(kind, options, packs):
    samples = random_samples(11, 4)
    cfg = Config(beta=0.1, micro_batch_tokens=40, temperature=0.7, max_grad_norm=0)
    fast = fast_policy(tiny_model(kind, **options), 0.7)
    plain = grpo.Policy(tiny_model(kind, **options), 0.7)
    harness.check.choose_attention(plain.model)
    expected, metrics = update_gradient(cfg, samples, policy=plain)
    gradient, same = update_gradient(cfg, samples, policy=fast, packs=packs)
    assert relative(gradient, expected) < 1e-5
    for name in ("loss", "entropy", "kl", "sampler_gap"):
        assert same[name] == pytest.approx(metrics[name], rel=1e-5)


def test_the_plain_policy_has_the_same_gradient_in_float64():
    samples = random_samples(11, 4, dtype=np.float64)
    cfg = Config(beta=0.1, micro_batch_tokens=40, max_grad_norm=0)
    expected, _ = update_gradient(cfg, samples, policy=grpo.Policy(tiny_model(dtype=F64), 1.0))
    gradient, _ = update_gradient(cfg, samples, policy=fast_policy(tiny_model(dtype=F64), 1.0))
    assert relative(gradient, expected) < 1e-12


def recompute(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))


@pytest.mark.parametrize("kind", ["plain", "fast"])
def test_recomputed_layers_have_the_same_gradient(kind):
    """Backward computes each layer a second time, with the attention of the first; only the layers
    are ever in training mode, and the model attends as it was loaded outside of the policy."""
    model = tiny_model()
    policy = fast_policy(model, 1.0) if kind == "fast" else grpo.Policy(model, 1.0)
    samples = random_samples(6, 3)
    calls, in_training = [], set()

    def note(module, args):
        calls.append(module)
        in_training.update(name for name, m in model.named_modules() if m.training)

    layers = model.model.layers
    for layer in layers:
        layer.register_forward_pre_hook(note)
    logps, _ = logps_of(policy, samples)
    expected = gradient_of(logps.square().sum(), list(model.parameters()))
    assert len(calls) == len(layers) and not in_training

    recompute(model)
    calls.clear()
    logps, _ = logps_of(policy, samples)
    assert not any(m.training for m in model.modules())
    assert model.config._attn_implementation == "sdpa"
    gradient = gradient_of(logps.square().sum(), list(model.parameters()))
    assert torch.equal(gradient, expected)
    assert len(calls) == 2 * len(layers)
    allowed = {"model", *(f"model.layers.{i}" for i in range(len(layers)))}
    assert in_training and in_training <= allowed
    assert model.config._attn_implementation == "sdpa"


def test_the_plain_policy_makes_no_logits_of_prompts(monkeypatch):
    model = tiny_model()
    shapes = []
    model.lm_head.register_forward_hook(lambda module, args, out: shapes.append(out.shape))
    samples = [sample_of(0, range(2, 12), [5, 6, 7]), sample_of(1, range(2, 22), [8, 9])]
    policy = grpo.Policy(model, 1.0)
    for s in samples:
        logps_of(policy, [s])
    logps_of(policy, samples)
    assert shapes == [(1, 4, 32), (1, 3, 32), (2, 13, 32)]


@pytest.mark.slow
def test_graphs_of_compiled_layers_serve_all_lengths(graphs):
    """Those of one layer serve all layers, packed rows, padded rows and all lengths."""
    policy = fast_policy(tiny_model(), 1.0)
    samples = random_samples(6, 3)
    expected, _ = logps_of(policy, samples)
    grpo.wrap(policy, Config(compile=True), CPU)
    for some in (samples, random_samples(9, 3, longest=30)):
        padded, _ = logps_of(policy, some, packs=False)
        packed, _ = logps_of(policy, some, packs=True)
        assert torch.allclose(padded, packed, atol=1e-5)
        policy.attention = "merged"
        merged, _ = logps_of(policy, some, packs=True)
        policy.attention = "auto"
        assert torch.allclose(padded, merged, atol=1e-5)
    assert torch.allclose(logps_of(policy, samples)[0], expected, atol=1e-5)
    assert 0 < len(graphs) <= 8
