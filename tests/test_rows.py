"""Rows: parquet's types, chats as texts, what a template of the hub writes, many rows."""

import datetime
import json

import pytest

import grpo
from tests.common import HERE
from tests.test_models import chat, load, write

MODEL = f"{HERE}/sample_data/model"
CHAT = chat("3+4=")
JSON = json.dumps


def test_a_parquet_file_has_the_rows_of_its_json_lines(tmp_path):
    """`datasets` stores what has several types as arrow.json, and makes timestamps of dates."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    day, noon = datetime.datetime(2024, 2, 29), datetime.datetime(2024, 2, 29, 12)

    def table(mixed):  # whose columns of several types are of this type
        inside = pa.struct([("a", mixed), ("day", pa.timestamp("ms")), ("none", pa.string())])
        return dict(
            answer=(mixed, [JSON("Paris"), "7", "null", None]),
            prompt=(mixed, [JSON(CHAT), JSON("2024-02-29"), "[1]", "{}"]),
            listed=(pa.list_(mixed), [["7", JSON("x")], [], None, [None]]),
            struct=(inside, [dict(a='"b"', day=day), dict(a="1"), None, {}]),
            deep=(pa.list_(inside), [[dict(a="[1]")], [], [], []]),
            maps=(pa.map_(pa.string(), mixed), [[("b", "1")], [], [], None]),
            day=(pa.timestamp("ms"), [day, None, noon, day]),
            date=(pa.date32(), [day.date()] * 4),
            words=(pa.dictionary(pa.int8(), pa.string()), list("abab")),
        )

    columns = {name: pa.array(x, kind) for name, (kind, x) in table(pa.string()).items()}
    kinds = {name: kind for name, (kind, _) in table(pa.json_(pa.string())).items()}
    columns = {name: column.cast(kinds[name]) for name, column in columns.items()}
    parquet.write_table(pa.table(columns), tmp_path / "x.parquet")
    first, second, third, fourth = grpo.read_rows(f"{tmp_path}/x.parquet")
    assert first == dict(
        answer="Paris",
        prompt=CHAT,
        listed=[7, "x"],
        struct=dict(a="b", day="2024-02-29", none=None),
        deep=[dict(a=[1], day=None, none=None)],
        maps=dict(b=1),
        day="2024-02-29",
        date="2024-02-29",
        words="a",
    )
    assert (second["answer"], second["prompt"], second["struct"]["a"]) == (7, "2024-02-29", 1)
    assert (third["answer"], third["struct"], third["day"]) == (None, None, noon)
    assert (fourth["answer"], fourth["listed"], fourth["maps"]) == (None, [None], None)


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl"])
def test_a_chat_may_be_a_json_text(name, tmp_path):
    """As a CSV has to have it."""
    row = dict(prompt=JSON(CHAT), answer="7")
    content = JSON(row)
    if name == "x.csv":
        content = 'prompt,answer\n"{}",7\n'.format(row["prompt"].replace('"', '""'))
    [read] = grpo.read_rows(write(tmp_path, content, name))
    assert read == row
    options = dict(chat_template_kwargs=JSON(dict(chat_template="{{ messages[0].content }}")))
    [prompt] = load(MODEL, [read], tmp_path, **options)
    assert prompt.text == "3+4=" and prompt.messages == CHAT
    with pytest.raises(grpo.ConfigError, match="row 1: .*no JSON"):
        load(MODEL, [dict(prompt=str(CHAT))], tmp_path, **options)
