"""What a run records can be read again: every token with its text, whatever the tokenizer and the messages hold."""

import itertools
import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trlx_hybrid.contract.types import Trajectory
from trlx_hybrid.errors import HybridError
from trlx_hybrid.testing.models import character_tokenizer
from trlx_hybrid_trajectories.record import RecordError, TokenTexts, read

from tests.support.recorded import append


def byte_level():
    """A token per byte, and two whose bytes end one character and begin the next."""
    table = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {"<|end|>": 0} | {sign: index for index, sign in enumerate(sorted(table), 1)}
    merges = [("©", "Ã"), ("®", "ð"), ("a", "b")]  # within éé, within 🧮🧮, and a plain one
    vocabulary |= {"".join(pair): len(vocabulary) + index for index, pair in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def sentencepiece():
    """As Llama 2's: words that begin with a blank, bytes for what no word has, the first blank of a text dropped."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁sum", "▁", "is", "4"]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


BYTES, PIECES, CHARACTERS = byte_level(), sentencepiece(), character_tokenizer()


def trajectory(**fields):
    ids = CHARACTERS.encode("2<eos>")
    fields = {"loss_mask": [1] * len(ids), "weight_version": 3} | fields
    return Trajectory(prompt_ids=CHARACTERS.encode("1+1="), completion_ids=ids, **fields)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "trajectories.jsonl"


@given(st.text(max_size=40))
@example("xéé🧮🧮ab")
def test_texts_put_together_are_the_text(text):
    ids = BYTES.encode(text)
    texts = TokenTexts(BYTES).of(ids, [1] * len(ids))
    assert len(texts) == len(ids)
    assert "".join(filter(None, texts)) == text


@given(st.lists(st.tuples(st.integers(0, len(BYTES) - 1), st.booleans()), max_size=30))
def test_texts_never_cross_from_sampled_to_observed(tokens):
    ids, mask = [token for token, _ in tokens], [sampled for _, sampled in tokens]
    texts = TokenTexts(BYTES).of(ids, mask)
    edges = [i for i in range(len(ids) + 1) if i in (0, len(ids)) or mask[i] != mask[i - 1]]
    for start, end in itertools.pairwise(edges):
        assert texts[start] is not None
        assert "".join(filter(None, texts[start:end])) == BYTES.decode(ids[start:end])


def test_split_characters_belong_to_their_first_token():
    ids = BYTES.encode("a🧮é")
    assert TokenTexts(BYTES).of(ids, [1] * len(ids)) == ["a", "🧮", None, None, None, "é", None]


def test_blanks_at_the_begin_of_a_turn_are_kept():
    ids = PIECES.convert_tokens_to_ids(["▁the", "▁sum", "▁", "is", "▁", "4", "<0xC3>", "<0xA9>"])
    texts = TokenTexts(PIECES).of(ids, [0, 0, 0, 0, 1, 1, 1, 1])
    assert texts == ["the", " sum", " ", "is", " ", "4", "é", None]


def test_a_processor_is_asked_for_its_tokenizer():
    class Processor:
        tokenizer = CHARACTERS

    assert TokenTexts(Processor()).of(CHARACTERS.encode("ab"), [1, 1]) == ["a", "b"]


def test_what_is_recorded_is_read(path):
    first = trajectory(loss_mask=[1, 0], logprobs=[-0.5, None], completion=[{"role": "assistant"}], reward=0.25)
    assert append(path, [first, trajectory()], CHARACTERS, step=4) == 2
    assert append(path, [trajectory()], CHARACTERS, step=5, training=False) == 1
    one, two, three = read(path)
    assert (one.line, one.step, one.training, one.weight_version, one.reward) == (1, 4, True, 3, 0.25)
    assert (one.prompt_ids, one.completion_ids) == (first.prompt_ids, first.completion_ids)
    assert (one.prompt_texts, one.completion_texts) == (list("1+1="), ["2", "<eos>"])
    assert (one.loss_mask, one.logprobs, one.completion) == ([1, 0], [-0.5, None], [{"role": "assistant"}])
    assert one.special_ids == {CHARACTERS.eos_token_id}
    assert (two.reward, two.logprobs, two.completion) == (None, None, None)
    assert (three.line, three.step, three.training) == (3, 5, False)
    assert not one.failed
    assert not three.failed


versions = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@given(versions)
def test_the_version_of_each_token_is_read_again(tmp_path_factory, versions):
    path = tmp_path_factory.mktemp("versions") / "trajectories.jsonl"
    ids = CHARACTERS.encode("1") * len(versions)
    seen = Trajectory(
        prompt_ids=ids, completion_ids=ids, loss_mask=[1] * len(ids), weight_version=3, weight_versions=versions
    )
    append(path, [seen], CHARACTERS, step=3)
    (one,) = read(path)
    assert one.weight_versions == versions
    runs = sum(here != before for here, before in zip(versions, [None, *versions[:-1]], strict=True))
    assert len(json.loads(path.read_text())["weight_versions"]) == runs


def test_a_file_of_an_earlier_version_has_no_versions_of_tokens(path):
    append(path, [trajectory()], CHARACTERS, step=0)
    row = json.loads(path.read_text())
    assert row.pop("weight_versions") is None
    path.write_text(json.dumps(row) + "\n")
    (one,) = read(path)
    assert one.weight_versions is None


@pytest.mark.parametrize("runs", [[[3, 1]], [[3, 3]], [3, 2], "3", [[3, "2"]], [["<b>", 2]], [[3, 2, 1]]])
def test_versions_that_are_not_those_of_the_tokens_are_named(path, runs):
    append(path, [trajectory()], CHARACTERS, step=0)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"weight_versions": runs}) + "\n")
    with pytest.raises(RecordError, match="weight_versions"):
        list(read(path))


@pytest.mark.parametrize(("limit", "written"), [(None, 3), (2, 2), (9, 3), (0, 0)])
def test_no_more_than_the_limit_is_written(path, limit, written):
    assert append(path, [trajectory()] * 3, CHARACTERS, step=0, limit=limit) == written
    assert path.exists() == bool(written)


def test_numbers_that_json_lacks_survive_in_strict_json(path):
    append(path, [trajectory(logprobs=[-math.inf, math.nan], reward=math.nan)], CHARACTERS, step=0)
    assert "NaN" not in path.read_text()
    (one,) = read(path)
    assert math.isnan(one.reward)
    assert one.logprobs[0] == -math.inf
    assert math.isnan(one.logprobs[1])


def test_messages_keep_what_json_can_hold(path):
    class Picture:
        size, mode = (640, 480), "RGB"

    loop = []
    loop.append(loop)
    content = [{"type": "image", "image": Picture()}, b"\x00", "data:image/png;base64," + "A" * 999, "\ud800", loop]
    append(path, [trajectory(completion=[{"role": "tool", 3: content}])], CHARACTERS, step=0)
    (one,) = read(path)
    image, raw, url, half, nested = one.completion[0]["3"]
    assert image == {"type": "image", "image": "<image 640x480>"}
    assert (raw, url, half) == ("<bytes>", "<data URL, 1021 characters>", "\ud800")
    assert "nested too deeply" in json.dumps(nested)


def test_a_line_being_written_is_left_out_and_never_spoils_the_next(path):
    append(path, [trajectory()], CHARACTERS, step=0)
    with path.open("a") as file:
        file.write('{"step": 1, "trai')
    assert len(list(read(path))) == 1
    append(path, [trajectory()], CHARACTERS, step=2)
    assert json.loads(path.read_text().splitlines()[2])["step"] == 2


@pytest.mark.parametrize(
    ("broken", "cause"),
    [
        ('{"step": 1, "trai', "Unterminated"),
        ("[]", "no JSON object"),
        ("{}", "no field 'reward'"),
        ("\xff\x00", "Expecting value"),
    ],
)
def test_a_broken_line_is_named(path, broken, cause):
    append(path, [trajectory()], CHARACTERS, step=0)
    with path.open("a") as file:
        file.write(f"{broken}\n")
    reader = read(path)
    assert next(reader).line == 1
    with pytest.raises(RecordError, match=cause) as caught:
        next(reader)
    assert f"{path}, line 2: not a recorded trajectory: " in str(caught.value)
    assert "sed -i 2d" in str(caught.value)


def test_a_line_may_go_where_others_are_trajectories(path):
    path.parent.mkdir()
    path.write_text('{"step": 1, "trai\n')
    append(path, [trajectory()], CHARACTERS, step=0)
    with pytest.raises(RecordError, match=r"line 1: not a recorded trajectory: .* sed -i 1d "):
        list(read(path))


def test_nothing_is_cut_from_a_file_that_holds_none(path):
    path.parent.mkdir()
    path.write_text("[project]\nname = 'mine'\n{}\n")
    with pytest.raises(RecordError, match=r"line 1: not a recorded trajectory: .* Give a file written by ") as caught:
        list(read(path))
    assert "sed" not in str(caught.value)


SCRIPT = "<img src=x onerror=alert(1)>\x1b[2J"
FIELDS = ("step", "training", "weight_version", "loss_mask", "prompt_ids", "completion_ids", "special_ids")


@pytest.mark.parametrize("field", [*FIELDS, "reward", "logprobs"])
def test_a_text_in_the_place_of_a_number_reaches_no_page_and_no_terminal(path, field):
    """A recording may be somebody else's."""
    append(path, [trajectory(logprobs=[0.0, 0.0])], CHARACTERS, step=0)
    row = json.loads(path.read_text())
    path.write_text(json.dumps(row | {field: [SCRIPT] * len(row[field]) if isinstance(row[field], list) else SCRIPT}))
    with path.open("a") as file:
        file.write("\n")
    with pytest.raises(RecordError, match="line 1: not a recorded trajectory: "):
        list(read(path))


@pytest.mark.parametrize("field", ["loss_mask", "logprobs", "completion_texts", "prompt_texts"])
def test_a_line_whose_tokens_do_not_match_is_broken(path, field):
    append(path, [trajectory(logprobs=[0.0, 0.0])], CHARACTERS, step=0)
    row = json.loads(path.read_text())
    path.write_text(json.dumps(row | {field: row[field][1:]}) + "\n")
    with pytest.raises(RecordError, match="line 1"):
        list(read(path))


def test_a_missing_file_is_named(path):
    with pytest.raises(HybridError, match=r"trajectories\.jsonl: No such file"):
        list(read(path))
