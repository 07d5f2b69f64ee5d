"""Text of tokens as they come: the text of all of them at every moment, whatever the tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pretrain.data.streamed_text import StreamedText, streamed_text
from pretrain.data.tokenizer import Tokenizer
from tests.unit.data.kinds_of_tokenizers import kinds

KINDS = kinds()
MIXED = "naïve café 日本語 👩‍🚀 the memory reads"
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXT, share=st.floats(0, 1))
@example(text=MIXED, share=0.0)
@example(text=MIXED, share=0.5)
@example(text="\N{REPLACEMENT CHARACTER} a", share=0.0)
def test_pieces_are_the_text_of_all_ids(kind: str, text: str, share: float) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.tokenize(text)
    begin = round(share * len(ids))
    pieces = list(streamed_text(ids[begin:], tokenizer, prompt=ids[:begin]))
    whole, before = tokenizer.detokenize(ids), tokenizer.detokenize(ids[:begin])
    # Half a character at the prompt's end decodes to another text than the whole one.
    if whole.startswith(before):
        assert before + "".join(pieces) == whole


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_pieces_are_the_text_of_any_ids(kind: str, data: st.DataObject) -> None:
    """A model may write what no text becomes: bytes without their rest, pieces in any order."""
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    assert "".join(streamed_text(ids, tokenizer)) == tokenizer.detokenize(ids)


@pytest.mark.parametrize("kind", ["bytes", "byte_level", "metaspace_with_bytes"])
def test_every_character_of_the_commonest_tokenizers_comes_out(kind: str) -> None:
    assert "".join(streamed_text(KINDS[kind].tokenize(MIXED), KINDS[kind])) == MIXED


@pytest.mark.parametrize("kind", ["bytes", "byte_level", "metaspace_with_bytes"])
def test_a_text_of_several_tokens_ends_the_text(kind: str) -> None:
    ids = iter(KINDS[kind].tokenize(MIXED))
    assert "".join(streamed_text(ids, KINDS[kind], stops=["é"])) == "naïve caf"


def test_text_comes_as_soon_as_it_is_certain(tokenizer: Tokenizer) -> None:
    """Letters that the vocabularies have are no reason to wait."""
    ids = tokenizer.tokenize("the memory reads")
    text = StreamedText(tokenizer, [])
    for number, id in enumerate(ids, start=1):
        text.add(id)
        assert text.rest() == "", number
