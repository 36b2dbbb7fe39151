"""Request streams: whole conversations, in turns that are a fixed number of requests apart."""

from __future__ import annotations

from collections import defaultdict

import pytest

from forespark.bench.conversations import (
    conversation,
    conversation_streams,
    interleave,
    question_streams,
    turns,
)
from forespark.bench.workloads import prompt_of
from forespark.config import StreamConfig
from forespark.record import append_jsonl


def talk(*texts, first="user"):
    sides = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": sides[i % 2], "content": text} for i, text in enumerate(texts)]


def characters(messages):
    return sum(len(message["content"]) for message in messages)


def test_both_forms_give_the_same_conversation():
    openai = {"messages": talk("a", "b", "c", "d")}
    names = {"user": "human", "assistant": "gpt"}
    sharegpt = {
        "conversations": [
            {"from": names[m["role"]], "value": f" {m['content']} "} for m in openai["messages"]
        ]
    }
    want = (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    assert conversation(openai) == conversation(sharegpt) == want


def test_system_stays_and_a_greeting_goes():
    system = [{"role": "system", "content": "be brief"}]
    made = conversation({"messages": system + talk("hi", "a", "b", "c", "d", first="assistant")})
    assert made[0] == ("system", "be brief") and made[1] == ("user", "a") and len(made) == 5


@pytest.mark.parametrize(
    "messages",
    [
        talk("a", "b", "c"),  # too short
        talk("a", "b", " ", "d"),
        [*talk("a", "b", "c", "d"), {"role": "assistant", "content": "again"}],
        [*talk("a", "b", "c", "d"), {"role": "tool", "content": "x"}],
        [*talk("a", "b", "c"), {"role": "assistant", "content": None}],
        ["a", "b", "c", "d"],
    ],
)
def test_unusable_conversations(messages):
    assert conversation({"messages": messages}) is None
    assert conversation({"prompt": "a"}) is None and conversation(3) is None


def test_a_request_per_user_turn_with_its_history():
    made = turns(conversation({"messages": talk("a", "b", "c", "d", "e")}))
    assert [len(prompt.messages) for prompt in made] == [1, 3, 5]
    assert made[1].chat()[-1] == {"role": "user", "content": "c"}
    assert all(longer.messages[: len(p.messages)] == p.messages
               for p, longer in zip(made, made[1:], strict=False))  # fmt: skip


@pytest.mark.parametrize("spacing", [1, 3, 4, 50])
def test_turns_are_spacing_apart(spacing):
    lengths = [3, 1, 5, 2, 2, 4, 1, 3, 6, 2, 2]
    conversations = [
        [prompt_of((("user", f"{c}/{t}"),)) for t in range(n)] for c, n in enumerate(lengths)
    ]
    stream = interleave(conversations, spacing)
    assert len(stream) == sum(lengths) and len({p.id for p in stream}) == len(stream)
    places = defaultdict(list)
    for place, prompt in enumerate(stream):
        name, turn = prompt.messages[0][1].split("/")
        assert len(places[name]) == int(turn), "turns in order"
        places[name].append(place)
    gaps = [b - a for found in places.values() for a, b in zip(found, found[1:], strict=False)]
    assert max(gaps) <= spacing
    # Only the end of the stream, where places stay empty, is closer.
    full = [b - a for found in places.values() for a, b in zip(found, found[1:], strict=False)
            if b < sum(lengths) - spacing * max(lengths)]  # fmt: skip
    assert set(full) <= {spacing}


@pytest.fixture
def stream(tmp_path):
    path = tmp_path / "talks.jsonl"
    for i in range(6):
        append_jsonl(path, {"messages": talk(f"q{i}", "x" * 10, "y" * 20, "z" * 40, "last")})
    append_jsonl(path, {"messages": talk("short", "one")})
    return StreamConfig(conversations=[f"file:{path}"], held_out=2, turn_spacing=2)


def test_streams_are_disjoint_and_reproducible(stream, caplog):
    made = conversation_streams(stream, characters, seed=3)
    again = conversation_streams(stream, characters, seed=3)
    assert made == again and len(made.measured) == 12 and len(made.held_out) == 6
    firsts = [{p.messages[0] for p in prompts} for prompts in (made.measured, made.held_out)]
    assert not firsts[0] & firsts[1]
    assert conversation_streams(stream, characters, seed=4).measured != made.measured
    endless = made.endless(10)
    assert [next(endless).id for _ in range(4)] == [p.id for p in (made.measured * 2)[10:14]]


def test_long_histories_are_left_out(stream):
    stream.max_prompt_tokens = 50  # the last turn of each has 76 characters, the second 32
    made = conversation_streams(stream, characters, seed=0)
    assert made.left_out == 6 and {len(p.messages) for p in made.measured} == {1, 3}
    stream.max_prompt_tokens = 1
    with pytest.raises(ValueError, match="which no request keeps to"):
        conversation_streams(stream, characters, seed=0)


def test_nothing_left_to_measure(stream):
    stream.held_out = 6
    with pytest.raises(ValueError, match=r"held_out: got 6, but there are only 6 conversations"):
        conversation_streams(stream, characters, seed=0)
    with pytest.raises(ValueError, match="only 3 conversations"):
        conversation_streams(stream, characters, seed=0, limit=3)


def test_a_source_without_conversations_is_refused(tmp_path):
    append_jsonl(tmp_path / "x.jsonl", {"prompt": "alone"})
    stream = StreamConfig(conversations=[f"file:{tmp_path / 'x.jsonl'}"], held_out=1)
    with pytest.raises(ValueError, match="no conversation of 4 or more messages"):
        conversation_streams(stream, characters, seed=0)


def test_starter_conversations_and_questions_can_be_streamed():
    stream = StreamConfig(held_out=8, turn_spacing=4)
    talks = conversation_streams(stream, characters, seed=0)
    asked = question_streams(stream, characters, seed=0)
    assert len(talks.measured) > 100 and len(asked.measured) > 100
    assert not {p.id for p in asked.measured} & {p.id for p in asked.held_out}
