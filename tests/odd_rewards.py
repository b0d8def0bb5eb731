"""Reward functions that fail, and one that logs, for runs of the tests (REWARDS in common.py)."""


def wrong_key(completion, row):
    return float(row["anwser"] in completion)


def sometimes(completion, row):
    return 1 / (len(completion) % 3)


def none(completion, row):
    return None


def messages(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **_):
    assert prompts[0][-1] == {"role": "user", "content": "1+2="}
    assert completions[0][0]["role"] == "assistant"
    log_extra("length", [len(ids) for ids in completion_ids])
    log_metric("from_step", trainer_state.global_step)
    return [len(ids) + trainer_state.max_steps for ids in completion_ids]
