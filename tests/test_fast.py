"""What makes the policy fast changes no number: the head in tiles, packed rows and their attention, compiled layers."""

import itertools
import types

import numpy as np
import pytest
import torch

import grpo
import harness.arrays
import harness.check
import harness.head
import harness.models
import harness.packing
from grpo import Config, Prompt, Sample
from harness.flags import ConfigError
from harness.ranks import World
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


def in_tiles(monkeypatch, logits, kept=0):
    """Of so many logits; backward finds the first ones as forward left them."""
    monkeypatch.setitem(harness.head.HEAD_TILE, "cpu", logits)
    monkeypatch.setattr(harness.head, "HEAD_KEPT", kept)


def head_inputs(frozen=False, with_bias=False, dtype=F64):
    hidden, weight, bias = (torch.randn(*shape, dtype=dtype) for shape in ((10, 5), (7, 5), (7,)))
    hidden.requires_grad_(), weight.requires_grad_(not frozen), bias.requires_grad_()
    return hidden, weight, bias if with_bias else None, torch.randint(0, 7, (10,)), 0.7


def plain_logps(hidden, weight, bias, targets, temperature):
    logps = (torch.nn.functional.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    return logps.gather(-1, targets[:, None])[:, 0], -(logps.exp() * logps).sum(-1)


@pytest.mark.parametrize(
    "columns, kept", [(1, 0), (2, 0), (3, 60), (4, 0), (6, 0), (7, 0), (100, 0)]
)  # V is 7
@pytest.mark.parametrize("frozen, with_bias", [(False, False), (False, True), (True, False)])
def test_gradient_of_the_head_in_tiles(frozen, with_bias, columns, kept, monkeypatch):
    in_tiles(monkeypatch, 10 * columns, kept)
    arguments = head_inputs(frozen, with_bias)
    assert torch.autograd.gradcheck(lambda *x: harness.head.HeadLogps.apply(*x)[0], arguments)
    logps, entropy = harness.head.HeadLogps.apply(*arguments)
    assert not entropy.requires_grad
    assert all(
        torch.allclose(*pair, atol=1e-12)
        for pair in zip((logps, entropy), plain_logps(*arguments), strict=True)
    )


def test_the_heads_gradient_is_added_to_an_earlier_one_in_place(monkeypatch):
    """By loss.backward() only: torch.autograd.grad gets it returned, and leaves .grad alone."""
    in_tiles(monkeypatch, 20)
    head, (hidden, weight, *rest) = harness.head.HeadLogps.apply, head_inputs()
    expected = torch.autograd.grad(plain_logps(hidden, weight, *rest)[0].sum(), (hidden, weight))
    found = torch.autograd.grad(head(hidden, weight, *rest)[0].sum(), (hidden, weight))
    assert weight.grad is None and all(
        relative(a, b) < 1e-12 for a, b in zip(found, expected, strict=True)
    )
    head(hidden, weight, *rest)[0].sum().backward()
    first = weight.grad
    (head(hidden, weight, *rest)[0] + head(hidden, weight, *rest)[0]).sum().backward()
    assert weight.grad is first and relative(first, 3 * expected[1]) < 1e-12
    assert (
        relative(*torch.autograd.grad(head(hidden, weight, *rest)[0].sum(), hidden), expected[0])
        < 1e-12
    )
    assert (
        relative(*torch.autograd.grad(head(hidden, weight, *rest)[0].sum(), weight), expected[1])
        < 1e-12
    )
    assert weight.grad is first and relative(first, 3 * expected[1]) < 1e-12
    doubled = 2 * weight  # as of adapters that are merged: no .grad of its own
    head(hidden, doubled, *rest)[0].sum().backward()
    [more] = torch.autograd.grad(plain_logps(hidden, 2 * weight, *rest)[0].sum(), weight)
    assert weight.grad is first and relative(first, 3 * expected[1] + more) < 1e-12
    with torch.autograd.graph.save_on_cpu():  # what is saved comes back as another tensor
        loss = head(hidden, weight, *rest)[0].sum()
    loss.backward()
    assert relative(weight.grad, 4 * expected[1] + more) < 1e-12


@pytest.mark.parametrize("kind, options", MODELS)
def test_a_tied_embedding_adds_its_rows_to_the_heads_gradient(kind, options):
    """One gradient of [V, H] is there, and it is dense."""
    policy, gradients = fast_policy(tiny_model(kind, **options), 0.7), []
    head, embedding = (
        policy.model.get_output_embeddings().weight,
        policy.model.get_input_embeddings(),
    )
    cfg = Config(micro_batch_tokens=40, max_grad_norm=0, beta=0.0)
    for wrapped in (False, True):
        if wrapped:
            grpo.wrap(policy, cfg, CPU)
        gradients.append(
            update_gradient(cfg, random_samples(11, 4), torch.float32, policy, policy, CPU)[0]
        )
    assert embedding.sparse == (embedding.weight is head and policy.plain_head)
    assert relative(gradients[1], gradients[0]) < 1e-6


@pytest.mark.parametrize("kind, options", MODELS)
def test_a_shared_prompt_changes_no_log_probability_and_no_gradient(kind, options):
    model = tiny_model(kind, **options)
    policy = fast_policy(model, 0.7)
    assert policy.packs
    samples = random_samples(11, 4)  # prompts of many lengths; mixed up, as a mini-batch is
    samples = [samples[i] for i in np.random.default_rng(0).permutation(11)]
    values, gradients = [], []
    for shared in (False, True):
        logps, entropy = logps_of(policy, samples, shared)
        values.append((logps, entropy))
        gradients.append(
            torch.cat(
                [g.flatten() for g in torch.autograd.grad((logps**2).sum(), model.parameters())]
            )
        )
    for plain, shared in zip(*values, strict=True):
        assert torch.allclose(plain, shared, atol=2e-5)
    assert relative(gradients[1], gradients[0]) < 1e-5
    one = [
        Sample(s.group, s.prompt, s.completion_ids[:1], s.sampler_logps[:1], "stop")
        for s in samples
    ]  # nothing follows the prompt
    assert torch.allclose(logps_of(policy, one, True)[0], logps_of(policy, one)[0], atol=2e-5)


def test_the_layout_of_a_packed_row():
    """The example of packed_layout, and what each token of it sees: its prompt, and its own past."""
    letters = "ABCXYdefghz"

    def sample(group, prompt, completion):
        ids = [ids_of([letters.index(x) for x in word]) for word in (prompt, completion)]
        return Sample(group, Prompt(ids[0], "", {}), ids[1], None, "")

    samples = [sample(0, "ABC", "def"), sample(0, "ABC", "gh"), sample(1, "XY", "z")]
    layout = harness.packing.packed_layout(samples)
    row = [letters[i] for i in layout["ids"][0]]
    assert row == list("ABCXYdeg")
    assert layout["positions"].tolist() == [[0, 1, 2, 0, 1, 3, 4, 3]]
    assert [letters[i] for i in layout["targets"]] == list("defghz")
    assert layout["read"].tolist() == [2, 5, 6, 2, 7, 4]
    assert layout["place"].tolist() == [0, 1, 2, 3, 4, 6] and layout["shape"] == (3, 3)
    seen = []
    for block in layout["blocks"]:
        later = block["key_positions"][:, None] > block["query_positions"][:, :, None]
        later = np.broadcast_to(later, (*block["queries"].shape, block["keys"].shape[1]))
        for n, t in (divmod(i, block["queries"].shape[1]) for i in block["real"]):
            seen.append("".join(row[k] for k in block["keys"][n][~later[n, t]]))
    assert seen == ["A", "AB", "ABC", "X", "XY", "ABCd", "ABCde", "ABCg"]
    # in the order of the samples, whatever theirs is: place finds each
    backwards = harness.packing.packed_layout(samples[::-1])
    assert backwards["place"].tolist() == [6, 7, 8, 3, 4, 0]


def test_completions_of_unlike_lengths_attend_in_two_blocks():
    """The long ones apart from the short ones: what pads a block is computed there."""

    def shapes(lengths):
        prompt = Prompt(ids_of([1, 2, 3]), "", {})
        samples = [
            Sample(0, prompt, ids_of(range(100 * i, 100 * i + n)), None, "")
            for i, n in enumerate(lengths, 1)
        ]
        rows = harness.packing.packed_layout(samples)
        _, *blocks = rows["blocks"]
        before = [([3] + s.completion_ids.tolist())[:-1] for s in samples]
        table = np.zeros(
            rows["shape"], np.int64
        )  # a row for each sample, in the order in which they were given
        table.flat[rows["place"]] = rows["ids"][0, rows["read"]]
        assert np.array_equal(table, harness.arrays.padded(before, np.int64))
        assert sum(len(block["real"]) for block in blocks) == sum(lengths) - len(lengths)
        return [(block["queries"].shape, block["keys"].shape[1]) for block in blocks]

    assert shapes([3, 40, 2, 4, 38, 1, 3, 2]) == [((2, 39), 42), ((6, 3), 6)]
    assert shapes([1, 30, 1, 1]) == [((1, 29), 32)]  # nothing follows the others
    assert shapes([9, 10, 8, 10]) == [((4, 9), 12)]  # next to nothing to save
    assert shapes([1, 1]) == []


LONGROPE = dict(
    rope_type="longrope", short_factor=[1.0] * 16, long_factor=[4.0] * 16, rope_theta=1e4
)
LONGROPE |= dict(original_max_position_embeddings=32)
M3 = dict(
    head_dim=32,
    num_local_experts=4,
    num_experts_per_tok=2,
    dense_intermediate_size=48,
    index_n_heads=1,
)
M3 |= dict(
    index_head_dim=16, index_block_size=4, index_topk_blocks=2, mlp_layer_types=["dense", "sparse"]
)
M3 |= dict(layer_types=["minimax_m3_sparse"] * 2)
LLAMA4 = dict(num_local_experts=2, intermediate_size_mlp=48, head_dim=32)


LAYERS_V4 = ["heavily_compressed_attention", "compressed_sparse_attention"]
V4 = dict(
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=48,
    mlp_layer_types=["moe", "moe"],
    head_dim=32,
    q_lora_rank=32,
    o_groups=2,
    o_lora_rank=16,
    hc_mult=2,
    index_n_heads=1,
    index_head_dim=16,
    index_topk=2,
    sliding_window=8,
    partial_rotary_factor=0.5,
    layer_types=["compressed_sparse_attention"] * 2,
    compress_rates=dict(compressed_sparse_attention=4, heavily_compressed_attention=16),
)


@pytest.mark.parametrize(
    "name, options, longest, packs",
    [
        ("Llama", {}, 60, True),
        (
            "Llama",
            dict(rope_parameters=dict(rope_type="dynamic", factor=2.0), max_position_embeddings=32),
            30,
            True,
        ),
        (
            "Llama",
            dict(rope_parameters=dict(rope_type="dynamic", factor=2.0), max_position_embeddings=32),
            60,
            None,
        ),
        ("Phi3", dict(rope_parameters=LONGROPE, original_max_position_embeddings=32), 30, True),
        ("Phi3", dict(rope_parameters=LONGROPE, original_max_position_embeddings=32), 60, None),
        (
            "Gemma2",
            dict(attn_logit_softcapping=1.0, head_dim=32),
            60,
            True,
        ),  # caps scores, which sdpa leaves out
        ("Llama4Text", LLAMA4 | dict(attention_chunk_size=16), 60, True),
        (
            "Llama4Text",
            LLAMA4 | dict(floor_scale=64, no_rope_layers=[0, 1]),
            60,
            False,
        ),  # scales by place in the row
        (
            "GptOss",
            dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=8, head_dim=32),
            60,
            False,
        ),  # attention with sinks
        (
            "MiniMaxM3VLText",
            M3,
            60,
            False,
        ),  # beyond its window keys are chosen, but not under another attention's name
        ("DeepseekV4", V4, 60, None),  # a text beside it moves ties of its index of keys
        ("DeepseekV4", V4 | dict(layer_types=["heavily_compressed_attention"] * 2), 60, False),
        ("DeepseekV4", V4 | dict(layer_types=LAYERS_V4), 60, None),  # in few of its tokens
        ("Falcon", {}, 60, False),
        ("Mamba", dict(state_size=4), 60, False),
    ],
)
def test_a_model_runs_as_transformers_has_it_or_not_at_all(name, options, longest, packs):
    """packs None: refused, a text's numbers would depend on the longest row beside it."""
    import transformers

    cfg = Config(temperature=0.7, micro_batch_tokens=400, max_completion_length=longest // 2)
    numbers = Prompt(np.arange(longest - longest // 2), "", {})
    if packs is None:
        with pytest.raises(
            ConfigError, match="its log-probabilities are off by .*longrope, dynamic"
        ):
            grpo.make_policy(made(name, options), cfg, [numbers])
        return
    policy = grpo.make_policy(made(name, options), cfg, [numbers])
    assert policy.packs is packs
    rng = np.random.default_rng(0)
    prompts = [Prompt(ids_of(rng.integers(2, 64, n)), "", {}) for n in (5, longest - 9)]
    samples = [
        Sample(g, prompts[g], ids_of(rng.integers(2, 64, n)), None, "")
        for g, n in ((0, 3), (0, 9), (1, 9))
    ]
    logps, _ = logps_of(policy, samples)
    eager = transformers.AutoModelForCausalLM.from_config(
        policy.model.config, attn_implementation="eager"
    )
    eager.load_state_dict(policy.model.state_dict())
    for s, found in zip(samples, logps, strict=True):
        ids = torch.tensor(np.concatenate([s.prompt.ids, s.completion_ids]))[None]
        expected = (eager.eval()(ids).logits[0, len(s.prompt.ids) - 1 : -1] / 0.7).log_softmax(-1)
        T = len(s.completion_ids)
        assert torch.allclose(found[:T], expected[torch.arange(T), s.completion_ids], atol=2e-5)


def made(name, options):
    import transformers

    sizes = dict(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    sizes |= dict(num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.1)
    sizes |= dict(eos_token_id=1, pad_token_id=0, bos_token_id=None)
    torch.manual_seed(0)
    config = grpo.without_randomness(getattr(transformers, name + "Config")(**(sizes | options)))
    return transformers.AutoModelForCausalLM.from_config(config).eval()


JITTER = dict(num_local_experts=4, router_jitter_noise=0.3)


@pytest.mark.parametrize(
    "name, options",
    [("BioGpt", dict(hidden_dropout_prob=0.5)), ("Mixtral", JITTER), ("Phimoe", JITTER)],
)
def test_nothing_in_an_update_is_random(name, options):
    """Two epochs at learning rate 0: the ratio of the second to the first is 1 everywhere, so nothing is clipped."""
    policy, samples = fast_policy(made(name, options), 1.0), random_samples(6, 3)
    grpo.compute_logps(policy, samples, "old_logps", Config(micro_batch_tokens=100), CPU)
    for s in samples:
        s.ref_logps = s.old_logps
    cfg = Config(
        num_epochs=2, learning_rate=0, max_sampler_gap=1e9, micro_batch_tokens=50, beta=0.1
    )
    metrics = grpo.update(policy, grpo.make_optimizer(policy, cfg), samples, cfg)
    assert metrics["kl"] < 1e-9 and not any(module.training for module in policy.model.modules())


def test_a_model_that_draws_random_numbers_is_refused():
    model = tiny_model()
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, out: out + 1e-3 * torch.randn_like(out)
    )
    with pytest.raises(ConfigError, match="two forwards of this model differ"):
        grpo.make_policy(model, Config())


@pytest.mark.parametrize("masked", [False, True])
def test_attention_by_products_is_attention(masked):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    g, (T, K) = torch.Generator().manual_seed(0), (5, 7) if masked else (6, 6)
    q, k, v = (torch.randn(3, h, n, 8, generator=g, dtype=F64) for h, n in ((6, T), (2, K), (2, K)))
    seen = torch.rand(3, 1, T, K, generator=g) < 0.7
    bias = torch.where(seen, 0.0, -torch.inf).to(F64) if masked else None
    layer = types.SimpleNamespace(num_key_value_groups=3, is_causal=True)
    inputs, outs, grads = [x.requires_grad_() for x in (q, k, v)], [], []
    for attend in (harness.packing.attention_by_products, sdpa_attention_forward):
        outs.append(attend(layer, *inputs, bias, scaling=0.3)[0])
        grads.append(
            torch.cat([x.flatten() for x in torch.autograd.grad(outs[-1].square().sum(), inputs)])
        )
    assert relative(outs[0], outs[1]) < 1e-12 and relative(grads[0], grads[1]) < 1e-12


def test_a_row_in_which_one_key_is_wrong_is_found(monkeypatch):
    honest = harness.packing.packed_masks

    def wrong(blocks, mask_function, **options):
        *before, last = honest(blocks, mask_function, **options)
        keys = last["keys"].clone()
        keys[0, 0] = keys[-1, -1]
        return [*before, last | dict(keys=keys)]

    for scale in (0.02, 0.1):
        model = tiny_model("llama", initializer_range=scale)
        assert grpo.make_policy(model, Config()).packs
        with monkeypatch.context() as patch:
            patch.setattr(harness.packing, "packed_masks", wrong)
            assert not grpo.make_policy(model, Config()).packs
        assert grpo.make_policy(model, Config()).packs


@pytest.mark.parametrize("n_ranks", [1, 3, 5])
def test_micro_batches_fill_their_budget_and_ranks_get_nearly_the_same(n_ranks):
    prompts = [Prompt(ids_of([5] * 100), "", {}) for _ in range(4)]
    samples = [
        Sample(g, p, ids_of([6] * 20), None, "stop")
        for g, p in enumerate(prompts)
        for _ in range(8)
    ]
    for packs in (True, False):

        def size(samples, packs=packs):
            if not packs:
                return len(samples) * 120
            return 100 * len({s.group for s in samples}) + 19 * len(samples)

        shares = grpo.plan(
            samples, packs, Config(micro_batch_tokens=300), World(0, n_ranks, CPU.device)
        )
        assert sorted(map(id, sum(sum(shares, []), []))) == sorted(map(id, samples))
        assert all(size(micro) <= 300 for share in shares for micro in share)
        assert all(size([*a, b[0]]) > 300 for share in shares for a, b in itertools.pairwise(share))
        loads = [sum(map(size, share)) for share in shares]
        assert max(loads) < 1.5 * sum(loads) / n_ranks + 100


@pytest.mark.parametrize("tied", [True, False])
def test_the_tiles_change_nothing(tied, monkeypatch):
    """Against the model's own logits, in several micro-batches: a tied weight has a gradient as the embedding, too."""
    samples, cfg = random_samples(9, 3), Config(beta=0.1, micro_batch_tokens=30)
    policy = fast_policy(tiny_model(tie_word_embeddings=tied), 1.0)
    policy.plain_head = False
    expected, metrics = update_gradient(cfg, samples, policy=policy)
    policy.plain_head = True
    for logits in (32 * 5, 2**22):
        in_tiles(monkeypatch, logits)
        found, same = update_gradient(cfg, samples, policy=policy)
        assert relative(found, expected) < 1e-6 and same["entropy"] == pytest.approx(
            metrics["entropy"], rel=1e-6
        )


@pytest.mark.parametrize("kind, options", MODELS)
@pytest.mark.parametrize("packs", [True, False])
def test_the_plain_policy_has_the_same_gradient(kind, options, packs):
    samples, cfg = (
        random_samples(11, 4),
        Config(beta=0.1, micro_batch_tokens=40, temperature=0.7, max_grad_norm=0),
    )
    fast, plain = (
        fast_policy(tiny_model(kind, **options), 0.7),
        grpo.Policy(tiny_model(kind, **options), 0.7),
    )
    harness.check.choose_attention(plain.model)
    expected, metrics = update_gradient(cfg, samples, policy=plain)
    found, same = update_gradient(cfg, samples, policy=fast, packs=packs)
    assert relative(found, expected) < 1e-5
    for name in ("loss", "entropy", "kl", "sampler_gap"):
        assert same[name] == pytest.approx(metrics[name], rel=1e-5)


def test_the_plain_policy_has_the_same_gradient_in_float64():
    samples, cfg = (
        random_samples(11, 4, dtype=np.float64),
        Config(beta=0.1, micro_batch_tokens=40, max_grad_norm=0),
    )
    expected, _ = update_gradient(cfg, samples, policy=grpo.Policy(tiny_model(dtype=F64), 1.0))
    found, _ = update_gradient(cfg, samples, policy=fast_policy(tiny_model(dtype=F64), 1.0))
    assert relative(found, expected) < 1e-12


def cosine(a, b):
    return (a @ b / (a.norm() * b.norm())).item()


@pytest.mark.parametrize("how", ["plain", "packed", "checkpointed", "own logits"])
def test_backward_asks_no_global_for_its_dtype(how, monkeypatch):
    """It runs after the autocast block, where CUDA's answer is float16: a gradient of 1/n_tokens underflows there."""
    policy, samples, weights = fast_policy(tiny_model(), 1.0), random_samples(40, 4), []
    policy.plain_head = how != "own logits"
    if how == "checkpointed":
        policy.model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs=dict(use_reentrant=False)
        )
    body = [p for name, p in policy.model.named_parameters() if "lm_head" not in name]
    advantages = torch.tensor([s.advantages[0] for s in samples])[:, None]
    default = torch.get_autocast_dtype("cpu")
    for forward, n_tokens in ((logps_of, 1), (in_bfloat16, 1e4), (in_bfloat16, 1e6)):
        logps, _ = forward(policy, samples, how == "packed")
        try:
            torch.set_autocast_dtype("cpu", torch.float16)
            gradient = torch.autograd.grad((logps * advantages).sum() / n_tokens, body)
        finally:
            torch.set_autocast_dtype("cpu", default)
        weights.append(torch.cat([g.flatten() for g in gradient]))
    assert all(cosine(g, weights[0]) > 0.999 for g in weights)


def test_the_entropy_is_computed_in_float32():
    torch.manual_seed(0)
    hidden, weight = torch.randn(30, 64), torch.randn(5000, 64) * 0.3
    with torch.autocast("cpu", torch.bfloat16):
        _, entropy = harness.head.HeadLogps.apply(
            hidden, weight, None, torch.zeros(30, dtype=torch.long), 1.0
        )
        logits = torch.nn.functional.linear(hidden, weight)
    logps = logits.double().log_softmax(-1)
    expected = -(logps.exp() * logps).sum(-1)
    assert logits.dtype == torch.bfloat16 and expected.std() > 0.1
    assert (entropy - expected).abs().max() < 1e-5


@pytest.mark.slow
def test_graphs_of_compiled_layers_serve_all_lengths(monkeypatch):
    """Those of one layer serve all layers, packed rows, padded rows and all lengths."""
    import torch._dynamo

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    graphs, policy, samples = [], fast_policy(tiny_model(), 1.0), random_samples(6, 3)
    plain, _ = logps_of(policy, samples)
    compile_ = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, **options: compile_(self, backend=backend, **options),
    )
    monkeypatch.setattr(torch._dynamo.config, "disable", False)
    grpo.wrap(policy, Config(compile=True), CPU)
    for samples_ in (samples, random_samples(9, 3, longest=30)):
        assert torch.allclose(
            *(logps_of(policy, samples_, packs)[0] for packs in (False, True)), atol=1e-5
        )
    assert torch.allclose(logps_of(policy, samples)[0], plain, atol=1e-5)
    assert 0 < len(graphs) <= 8
