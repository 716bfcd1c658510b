"""Matchers: masks, accepting, copies and what is forced agree; turns end only where the output may end."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Sequence

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from pelton.errors import EngineError, RequestError
from pelton.runtime.grammar.compiler import GrammarCompiler
from pelton.runtime.grammar.forms import write_grammar
from pelton.runtime.grammar.limits import GrammarLimits
from pelton.runtime.grammar.mask_filler import MaskFiller
from pelton.runtime.grammar.matcher import LlguidanceGrammar, LlguidanceMatcher
from pelton.runtime.grammar.vocabulary import Vocabulary
from pelton.runtime.structured import MasksOnDemand, StructuredOutput, Tag, allows
from pelton.runtime.tokenizer import Tokenizer
from support.constrained import allowed, walk
from support.json_schemas import SCHEMAS
from support.vocabularies import byte_level, sentencepiece

TOKENIZER = byte_level()
IM_START, IM_END = (TOKENIZER.control_token_ids[text] for text in ("<|im_start|>", "<|im_end|>"))
EOS = (0, IM_END)  # as a generation_config may name several
NUM_LOGITS = TOKENIZER.vocab_size + 100
NUM_WORDS = -(-NUM_LOGITS // 32)
VOCABULARY = Vocabulary(TOKENIZER, NUM_LOGITS, EOS)
COMPILER = GrammarCompiler(TOKENIZER, NUM_LOGITS, EOS)
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
TAGGED = StructuredOutput(
    "tagged",
    tags=(
        Tag('<|im_start|>{"name": "f", "arguments": ', json.dumps(POINT), "}"),
        Tag("[G]", '{"type": "null"}', "<end>"),
    ),
    separator="\n",
    is_repeated=True,
)
FORMS = (
    StructuredOutput("json_object"),
    StructuredOutput("json_schema", json.dumps(POINT)),
    StructuredOutput("json_schema", json.dumps(SCHEMAS["expression"])),
    StructuredOutput("regex", r"^(?:yes|no), \d{2,4}( é+)?$"),
    StructuredOutput("choice", choices=("yes", "yes please", "no", 'a/b "c"\né')),
    StructuredOutput("grammar", 'root ::= "(" root ")" | [a-z]{1,3}'),
    StructuredOutput("grammar", "start: NUM (OP NUM)*\nNUM: /[0-9]{1,3}/\nOP: /[-+]/"),
    TAGGED,
)


def grammar(source: object) -> LlguidanceGrammar:
    return COMPILER.compile(StructuredOutput("json_schema", json.dumps(source)))


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def mask(matcher: LlguidanceMatcher) -> np.ndarray:
    row = np.empty(NUM_WORDS, np.int32)
    matcher.fill(row)
    return row


def may_follow(matcher: LlguidanceMatcher) -> list[int]:
    ids: list[int] = allowed(matcher, NUM_WORDS).tolist()
    return ids


def all_accepted(matcher: LlguidanceMatcher, token_ids: Sequence[int]) -> bool:
    return all(map(matcher.accept, token_ids))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
def test_masks_accepting_and_copies_agree(form: StructuredOutput) -> None:
    compiled = COMPILER.compile(form)
    for seed in range(6):
        rng = random.Random(seed)
        output = walk(compiled, TOKENIZER, NUM_LOGITS, rng, num_free=8)[:60]
        matcher = compiled.start()
        masks, copies = [mask(matcher)], [matcher.copy()]
        for token_id in output:
            assert matcher.accept(token_id)
            masks.append(mask(matcher))
            copies.append(matcher.copy())
        for _ in range(8):
            place = rng.randint(0, len(output))
            matcher = copies[place].copy()
            np.testing.assert_array_equal(mask(matcher), masks[place])
            for token_id in rng.sample(range(NUM_LOGITS), 20):
                if matcher.copy().accept(token_id):
                    continue
                assert not matcher.accept(token_id)  # a refusal changes nothing
            np.testing.assert_array_equal(mask(matcher), masks[place])
            assert all_accepted(matcher, output[place:])
        np.testing.assert_array_equal(mask(compiled.start(output[:3])), masks[min(3, len(output))])


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
def test_every_token_of_a_mask_is_accepted(form: StructuredOutput) -> None:
    compiled = COMPILER.compile(form)
    output = walk(compiled, TOKENIZER, NUM_LOGITS, random.Random(1), num_free=5)[:20]
    for size in range(len(output) + 1):
        matcher = compiled.start(output[:size])
        for token_id in may_follow(matcher):
            assert matcher.copy().accept(token_id)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
def test_forced_tokens_are_the_only_ones(form: StructuredOutput) -> None:
    compiled = COMPILER.compile(form)
    for seed in range(4):
        output = walk(compiled, TOKENIZER, NUM_LOGITS, random.Random(seed), num_free=5)[:40]
        matcher = compiled.start()
        for token_id in output:
            before = mask(matcher)
            forced = matcher.forced(4)
            np.testing.assert_array_equal(mask(matcher), before)
            assert len(forced) <= 4
            ahead = matcher.copy()
            for only in forced:
                assert may_follow(ahead) == [only]
                assert ahead.accept(only)
            assert matcher.accept(token_id)


def test_text_that_must_follow_is_forced_as_the_tokenizer_spells_it() -> None:
    compiled = COMPILER.compile(StructuredOutput("regex", "(a|b) hello world"))
    assert compiled.start(encode("a")).forced(10) == encode(" hello world")
    assert compiled.start(encode("a")).forced(1) == encode(" hello world")[:1]
    assert compiled.start().forced(10) == []


def test_so_03_a_long_text_is_spelled_once_for_all_its_forced_tokens() -> None:
    text = ("hello world " * 700)[:8000]
    compiled = COMPILER.compile(StructuredOutput("choice", choices=(text,)))
    matcher = compiled.start()
    start = time.thread_time()
    matcher.fill(np.empty(NUM_WORDS, np.int32))
    one_mask = time.thread_time() - start
    start = time.thread_time()
    assert matcher.forced(64) == encode(text)[:64]
    assert time.thread_time() - start < 12 * one_mask


def test_so_05_every_eos_ends_the_output_where_it_may_end_and_nowhere_else() -> None:
    compiled = grammar(POINT)
    text = encode('{"x": 1')
    for size in range(1, len(text) + 1):
        matcher = compiled.start(text[:size])
        assert not set(EOS) & set(may_follow(matcher))
        assert not any(map(matcher.accept, EOS))
        assert not matcher.is_finished
    matcher = compiled.start(encode('{"x": 1}'))
    assert matcher.is_finished
    assert may_follow(matcher) == sorted(EOS)
    for token_id in EOS:
        ended = matcher.copy()
        assert ended.accept(token_id)
        assert may_follow(ended) == sorted(EOS)
        assert not ended.accept(encode(" ")[0])
    # Where more may follow too.
    matcher = COMPILER.compile(StructuredOutput("choice", choices=("yes", "yes please"))).start(encode("yes"))
    assert set(EOS) < set(may_follow(matcher))
    assert not matcher.is_finished
    assert matcher.accept(IM_END)
    assert matcher.is_finished


def test_padding_and_control_tokens_are_no_text() -> None:
    matcher = COMPILER.compile(StructuredOutput("json_schema", '{"type": "string"}')).start(encode('"a'))
    ids = may_follow(matcher)
    assert len(ids) > 200
    assert not set(ids) & (
        set(TOKENIZER.control_token_ids.values()) | set(range(TOKENIZER.vocab_size, NUM_LOGITS))
    )
    for token_id in (IM_START, NUM_LOGITS - 1, NUM_LOGITS + 1000, -1):
        assert not matcher.accept(token_id)
    spelled = [token_id for part in ("<", "|im_start|>", '"') for token_id in encode(part)]
    assert all_accepted(matcher, spelled)
    assert matcher.is_finished


def test_a_tag_may_have_its_control_token_or_its_text() -> None:
    compiled = COMPILER.compile(TAGGED)
    rest = encode('{"name": "f", "arguments": {"x":1}}')
    spelled = [*encode("<"), *encode("|im_start|>")]
    for begin in ([IM_START], spelled):
        matcher = compiled.start(begin)
        assert all_accepted(matcher, rest)
        assert set(EOS) < set(may_follow(matcher))  # it is repeated
        assert all_accepted(matcher, encode("\n[G]null<end>"))
    once = COMPILER.compile(StructuredOutput("tagged", tags=TAGGED.tags)).start([IM_START, *rest])
    assert once.is_finished


def test_a_tag_that_ends_the_turn_by_its_text_does_not_end_it() -> None:
    tag = Tag("", '{"type": "null"}', "<|im_end|>\n")
    matcher = COMPILER.compile(StructuredOutput("tagged", tags=(tag,))).start(encode("null"))
    assert not matcher.accept(IM_END)
    assert matcher.forced(20) == [*encode("<"), *encode("|im_end|>"), *encode("\n")]


def test_sentencepiece_text_is_forced_without_another_space() -> None:
    tokenizer: Tokenizer = sentencepiece()
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    matcher = compiler.compile(StructuredOutput("regex", "(a|b)hello world")).start()
    assert matcher.accept(tokenizer.encode("xa", add_special_tokens=False)[-1])
    text = b"".join(map(tokenizer.token_bytes, matcher.forced(20)))
    assert text == b"hello world"


def test_a_start_that_the_form_does_not_allow_is_an_error() -> None:
    with pytest.raises(EngineError, match="token 1 of the output"):
        grammar(POINT).start([*encode("{")[:1], IM_START])


def test_so_01_a_grammar_that_outgrows_its_limits_ends_a_request_and_nothing_else() -> None:
    vocabulary = Vocabulary(TOKENIZER, NUM_LOGITS, EOS)
    text = json.dumps({"grammars": [{"lark_grammar": "start: /([a-z]*[aeiou][a-z]{12}){2,}x/"}]})
    limits = LLParserLimits(max_lexer_states=60)
    outgrown = LlguidanceGrammar(
        vocabulary, LLMatcher(vocabulary.table, text, log_level=0, limits=limits)
    ).start()
    rng = random.Random(3)
    filler = MaskFiller(NUM_LOGITS, num_threads=2)
    errors: list[EngineError] = []
    for _ in range(60):
        other = grammar(POINT).start()
        result, sound = filler.submit([(outgrown, encode("abc")), (other, encode("{"))]).result()
        assert (sound.error, len(sound.rows)) == (None, 2)
        if result.error is not None:
            errors.append(result.error)
            break
        outgrown.accept(rng.choice(encode("abcdefghijklmnopqrstuvwxyz")))
    filler.close()
    assert "make the schema or grammar simpler" in str(errors[0])
    assert len(result.rows) == 0
    for use in (outgrown.accept, outgrown.allows, outgrown.forced):
        with pytest.raises(EngineError):
            use(1)
    with pytest.raises(EngineError):
        mask(outgrown)
    with pytest.raises(EngineError):
        _ = outgrown.is_finished


class _Broken:
    """A matcher that llguidance does not know and that always fails."""

    is_finished = False

    def fill(self, mask: np.ndarray) -> None:
        raise ValueError("no mask")

    def allows(self, token_id: int) -> bool:
        return False

    def accept(self, token_id: int) -> bool:
        return False

    def forced(self, max_tokens: int) -> list[int]:
        return []

    def copy(self) -> _Broken:
        return self


def test_what_fails_for_one_matcher_is_an_error_of_its_own() -> None:
    shared, sound = grammar(POINT).start(), grammar(POINT).start()
    filler = MaskFiller(NUM_LOGITS, num_threads=2)
    # llguidance refuses a matcher that stands twice, and with it the whole call.
    results = filler.submit([(shared, []), (_Broken(), []), (shared, []), (sound, encode("{"))]).result()
    filler.close()
    assert [result.error is None for result in results] == [True, False, True, True]
    assert "no mask" in str(results[1].error)
    np.testing.assert_array_equal(results[3].rows[0], mask(sound))


def test_so_01_a_form_that_one_output_outgrew_is_compiled_anew() -> None:
    """Copies share the lexer, so its limit once reached would end every later output of the form."""
    text = json.dumps({"grammars": [{"lark_grammar": "start: /([a-z]*[aeiou][a-z]{12}){2,}x/"}]})
    limits = LLParserLimits(max_lexer_states=60)
    compiled = LlguidanceGrammar(VOCABULARY, LLMatcher(VOCABULARY.table, text, log_level=0, limits=limits))
    assert not compiled.is_outgrown
    matcher, rng = compiled.start(), random.Random(3)

    def go_on() -> None:
        for _ in range(60):
            matcher.accept(rng.choice(encode("abcdefghijklmnopqrstuvwxyz")))
            mask(matcher)

    with pytest.raises(EngineError):
        go_on()
    assert compiled.is_outgrown


def test_masks_of_a_step_are_filled_with_their_drafts() -> None:
    rng = random.Random(5)
    asks: list[tuple[LlguidanceMatcher, list[int]]] = []
    for form in FORMS:
        compiled = COMPILER.compile(form)
        output = walk(compiled, TOKENIZER, NUM_LOGITS, rng, num_free=8)
        for _ in range(4):
            size = rng.randint(0, len(output))
            draft = output[size : size + 5]
            asks.append((compiled.start(output[:size]), draft))
            asks.append((compiled.start(output[:size]), [*draft[:2], NUM_LOGITS + 7, 1]))
            asks.append((compiled.start(output[:size]), [*draft[:2], IM_START, *draft]))
            asks.append((compiled.start(output), [IM_END, 0, *draft]))
    filler = MaskFiller(NUM_LOGITS, num_threads=2)
    try:
        for _ in range(2):  # the matchers stand where they stood
            for (matcher, draft), result in zip(asks, filler.submit(asks).result(), strict=True):
                assert result.error is None
                num_accepted, ahead = 0, matcher.copy()
                for row in result.rows:
                    np.testing.assert_array_equal(row, mask(ahead))
                    if num_accepted == len(draft) or draft[num_accepted] not in may_follow(ahead):
                        break
                    assert ahead.accept(draft[num_accepted])
                    num_accepted += 1
                assert len(result.rows) == num_accepted + 1
        assert filler.submit([]).result() == []
    finally:
        filler.close()


def test_what_is_asked_on_demand_is_what_the_masks_say() -> None:
    """Also where text must follow, which has one spelling in masks and many in the vocabulary."""
    rng = random.Random(8)
    forms = [
        *FORMS,
        StructuredOutput("regex", "(the quick brown fox|a lazy dog) jumps"),
        StructuredOutput("choice", choices=("abcabc",)),
    ]
    for form in forms:
        compiled = COMPILER.compile(form)
        output = walk(compiled, TOKENIZER, NUM_LOGITS, rng, num_free=8)
        masks = MasksOnDemand(compiled.start(), output, VOCABULARY.num_words)
        for place in range(len(output) + 1):
            row = masks.row(place)
            may = [token_id for token_id in range(NUM_LOGITS) if allows(row, token_id)]
            some = rng.sample(may, min(20, len(may))) + rng.sample(range(NUM_LOGITS), 60)
            for token_id in {*some, *output[place : place + 1]}:
                assert masks.allows(place, token_id) == allows(row, token_id), (form, place, token_id)


def test_equal_forms_are_compiled_once_and_the_latest_are_kept() -> None:
    form = StructuredOutput("regex", "[a-c]{3}")
    assert COMPILER.compile(form) is COMPILER.compile(StructuredOutput("regex", "[a-c]{3}"))
    first = COMPILER.compile(form)
    for index in range(200):
        COMPILER.compile(StructuredOutput("choice", choices=(f"c{index}",)))
    assert COMPILER.compile(form) is not first


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (StructuredOutput("regex", "(", field="guided_regex"), r"guided_regex: a '\(' without its '\)'"),
        (StructuredOutput("regex", "", field="guided_regex"), "guided_regex: it is empty"),
        (StructuredOutput("regex", "[^\\s\\S]", field="guided_regex"), "guided_regex cannot be compiled"),
        (StructuredOutput("grammar", " \n", field="guided_grammar"), "guided_grammar: it is empty"),
        (StructuredOutput("grammar", "root ::= a", field="g"), "g: Rule 'a' not found"),
        (StructuredOutput("grammar", 'root ::= ""', field="g"), "g cannot be compiled: it allows no text"),
        (StructuredOutput("grammar", "root ::= root", field="g"), "g cannot be compiled"),
        (StructuredOutput("grammar", "root ::= " + "(" * 9000, field="g"), "g: groups more than 64 deep"),
        (StructuredOutput("grammar", 'start: "a" b', field="g"), "g cannot be compiled"),
        (StructuredOutput("grammar", "start: %json {}", field="g"), "g: '%json' is not supported"),
        (StructuredOutput("grammar", "start: <|im_end|>", field="g"), "g: '<' is not supported"),
        (StructuredOutput("choice", field="c"), "c: between 1 and"),
        (StructuredOutput("choice", choices=("a", ""), field="c"), r"c\[1\]: a choice must not be empty"),
        (StructuredOutput("choice", choices=("\ud800",), field="c"), "c: the text is not valid Unicode"),
        (
            StructuredOutput("choice", choices=("a", "b" * 9000), field="c"),
            r"c\[1\]: a choice of more than 8192",
        ),
        (
            StructuredOutput("regex", "a{9000}", field="r"),
            "r cannot be compiled: it begins with more than 8192",
        ),
        (StructuredOutput("tagged", field="tools"), "tools: no tags"),
        (
            StructuredOutput("tagged", tags=(Tag("<", '{"not": {}}', ">"),), field="tools"),
            r"tools\[0\]/not: ",
        ),
    ],
)
def test_so_01_forms_that_cannot_be_kept_are_refused(form: StructuredOutput, message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}") as error:
        COMPILER.compile(form)
    assert str(error.value).startswith(str(error.value.field))


@pytest.mark.parametrize("start", ["root ::= ", "start: ", ""])
@pytest.mark.parametrize("unit", ["[", '"', "/", "\n", " ", "start\n", "[\\", '"\\', "//", "#", "%", "<"])
def test_so_03_a_long_grammar_is_scanned_in_linear_time(start: str, unit: str) -> None:
    text = start + unit * ((256 << 10) // len(unit) - 10)
    begin = time.thread_time()
    with contextlib.suppress(RequestError):
        write_grammar(StructuredOutput("grammar", text), VOCABULARY, GrammarLimits())
    assert time.thread_time() - begin < 2


def test_a_model_without_an_end_has_no_forms() -> None:
    compiler = GrammarCompiler(TOKENIZER, NUM_LOGITS, ())
    compiler.warm_up()
    with pytest.raises(RequestError, match="no token that ends"):
        compiler.compile(FORMS[0])
