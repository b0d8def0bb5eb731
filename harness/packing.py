"""Rows without padding: each group's prompt once, and the completions.

They are laid out on the CPU, which has all lengths, so no pass waits for the device. N = samples,
T = completion tokens (padded), n = tokens that the policy sampled, S = tokens of a row. In a block
of texts that attend together T = queries, K = keys, both padded.
"""

import math

import numpy as np

from harness.arrays import padded, padded_rows

NEVER = 2**30  # the place of padding: later than every query, so causal attention drops it


def padded_layout(samples) -> dict:
    """A row for each text, padded on the right: see packed_layout for what the arrays mean."""
    rows = padded_rows(samples)
    sampled = padded([s.sampled for s in samples], bool)  # [N, T]
    N, L = rows["ids"].shape
    read = rows["before"] + L * np.arange(N)[:, None]
    return dict(
        shape=sampled.shape,
        ids=rows["ids"],  # [N, L]
        targets=rows["completion"][sampled],
        read=read[sampled],
        place=np.flatnonzero(sampled),
    )


def packed_layout(samples, multiple: int = 1, one_by_one: bool = True) -> dict:
    """One row without padding, as arrays; samples have group, prompt.ids, completion_ids, sampled.

    It holds each group's prompt once, then the completions, group by group, without their last
    tokens, which predict nothing. The groups with long completions come first. Two groups: prompt
    ABC with completions def and gh, prompt XY with z:

        ids        A B C X Y d e g     [1, S]
        positions  0 1 2 0 1 3 4 3     [1, S] in the text
        targets    d e f g h z         [n] the tokens that the policy sampled
        read       2 5 6 2 7 4         [n] the place in the row that predicts each of them
        place      0 1 2 3 4 6         [n] where they stand in the table [N, T], flattened

    Attention takes such a row in one of two ways (attention.py chooses):

        blocks     the prompts, and the completions: which places attend to which
        outputs    [S] the place of each token among the queries of all blocks, one after another
        calls      the same without padding and masks: see calls_of
        mean_text  tokens of a prompt or completion, on average

    multiple: the number of keys of a block is a multiple of it. one_by_one: a call for each text.
    """
    order = by_group(samples)
    lengths = np.array([len(samples[i].completion_ids) for i in order])
    T = lengths.max()

    ids = []
    positions = []
    S = 0

    prompts = []
    prompt_starts = {}  # of each group
    for i in order:
        sample = samples[i]
        if sample.group not in prompt_starts:
            P = len(sample.prompt.ids)
            prompt_starts[sample.group] = S
            prompts.append((0, 0, S, P))
            ids.append(sample.prompt.ids)
            positions.append(np.arange(P))
            S += P

    completions = []  # as block_of takes them
    targets = []
    read = []
    place = []
    for i in order:
        sample = samples[i]
        P = len(sample.prompt.ids)
        C = len(sample.completion_ids)
        prompt_start = prompt_starts[sample.group]
        completions.append((prompt_start, P, S, C - 1))
        ids.append(sample.completion_ids[:-1])
        positions.append(np.arange(P, P + C - 1))
        # The first token follows the prompt, the others the token before them.
        before = np.append(prompt_start + P - 1, np.arange(S, S + C - 1))  # [C]
        targets.append(sample.completion_ids[sample.sampled])
        read.append(before[sample.sampled])
        place.append(np.flatnonzero(sample.sampled) + i * T)
        S += C - 1

    prompts = np.array(prompts)
    completions = np.array(completions)
    blocks = [block_of(prompts, multiple, prompts=True)]
    by_length = np.argsort(-lengths, kind="stable")
    for part in long_and_short(lengths[by_length]):
        blocks.append(block_of(completions[by_length[part]], multiple))
    rows = [block.pop("rows").flatten() for block in blocks]
    return dict(
        shape=(len(samples), int(T)),
        ids=np.concatenate(ids).astype(np.int64)[None],
        positions=np.concatenate(positions)[None],
        targets=np.concatenate(targets).astype(np.int64),
        read=np.concatenate(read),
        place=np.concatenate(place),
        blocks=blocks,
        outputs=np.concatenate(rows).argsort(kind="stable")[:S],  # padding is last
        calls=calls_of(prompts, completions, one_by_one),
        mean_text=S / (len(prompts) + np.count_nonzero(lengths > 1)),
    )


def by_group(samples) -> list[int]:
    """The samples' numbers, group by group. The longest completion of all comes first, with its
    group; in a group, too, the long ones come first."""
    groups = {}
    for i in sorted(range(len(samples)), key=lambda i: -len(samples[i].completion_ids)):
        groups.setdefault(samples[i].group, []).append(i)
    return [i for members in groups.values() for i in members]


def long_and_short(lengths: np.ndarray) -> list[slice]:
    """Which completions attend together, by their lengths [N], longest first.

    A block is as wide as its longest completion. So long and short ones get two blocks if that
    saves a fifth. On one CPU core an update of the bundled task then takes 0.80 of the time
    when answers have 9 tokens on average, 0.94 at 22, and no gain from 26 on; the update of a model
    of 256 hidden units takes 0.99.
    """
    N = len(lengths)
    cuts = np.arange(N)
    areas = cuts * lengths[0] + (N - cuts) * lengths  # of both blocks, cut before each completion
    cut = int(areas.argmin())
    parts = [slice(0, N)]
    if 5 * areas[cut] < 4 * areas[0]:  # areas[0]: of one block
        parts = [slice(0, cut), slice(cut, N)]
    return [part for part in parts if lengths[part.start] > 1]  # skip: all have one token


def block_of(texts: np.ndarray, multiple: int, prompts: bool = False) -> dict:
    """Texts that attend to themselves, and to a prompt that stands elsewhere in the row.

    texts [N, 4]: start and size of the prompt, start and size of the rest. Queries are the rest.
    prompts: the texts are prompts; their queries and keys make a square, for the causal kernel.

    queries [N, T], keys [N, K]: places in the row; padding repeats the last one. query_positions,
    key_positions: positions in the text. rows [N, T]: the queries again, NEVER for padding.
    """
    prompt_starts, prompt_sizes, starts, sizes = texts.T[:, :, None]  # [N, 1] each
    ends = prompt_sizes + sizes
    last = sizes - 1

    K = math.ceil(ends.max() / multiple) * multiple
    k = np.arange(K)
    t = np.arange(sizes.max())
    if prompts:
        t = k
    query = np.minimum(t, last)  # [N, T]
    key = np.minimum(k - prompt_sizes, last)  # [N, K], negative in the prompt
    return dict(
        queries=starts + query,
        keys=np.where(k < prompt_sizes, prompt_starts + k, starts + key),
        query_positions=prompt_sizes + query,
        key_positions=np.where(k < ends, k, NEVER),
        rows=np.where(t < sizes, starts + query, NEVER),
        prompts=prompts,
    )


def calls_of(prompts: np.ndarray, completions: np.ndarray, one_by_one: bool) -> list[dict]:
    """What attends to what in a row: prompts to themselves, causally; the completions of a group,
    as one text, to all of their prompt; completions to themselves, causally.

    prompts and completions: as block_of takes them. One call for each of these three kinds, or with
    one_by_one for each text. Empty completions are left out, because some kernels treat empty texts
    in special ways; so are prompts that nothing follows. These stand last in the row, so the other
    prompts are contiguous.
    """
    completions = completions[completions[:, 3] > 0]
    groups = []
    for start, size in prompts[:, 2:]:
        members = completions[completions[:, 0] == start]
        if len(members) > 0:
            groups.append((start, size, members[0, 2], members[:, 3].sum()))

    to_themselves = [2, 3, 2, 3]
    kinds = [
        (prompts[:, to_themselves], True),
        (groups, False),
        (completions[:, to_themselves], True),
    ]
    calls = []
    for kind, causal in kinds:
        parts = [kind]
        if one_by_one:
            parts = [[text] for text in kind]
        calls += [call_of(np.array(part), causal) for part in parts if len(part) > 0]
    return calls


def call_of(attending: np.ndarray, causal: bool) -> dict:
    """Texts that attend, one after another in the row: each text's queries attend to its keys.

    attending [N, 4]: start and size of the keys, start and size of the queries. queries, keys: the
    part of the row with all of them. offsets: where queries and keys of each text start in this
    part [N + 1], with its end, and the longest sizes, as CUDA's kernel takes them.
    """
    first_key, _, first_query, _ = attending[0].tolist()
    _, key_sizes, _, query_sizes = attending.T
    key_starts = np.append(0, key_sizes.cumsum()).astype(np.int32)
    query_starts = np.append(0, query_sizes.cumsum()).astype(np.int32)
    # With one query per text the kernel would rearrange heads and batch; two is a bound, too.
    longest_query = max(2, int(query_sizes.max()))
    return dict(
        queries=slice(first_query, first_query + int(query_starts[-1])),
        keys=slice(first_key, first_key + int(key_starts[-1])),
        offsets=[query_starts, key_starts, longest_query, int(key_sizes.max())],
        causal=causal,
    )
