"""The demo model's recipe: documents hold their values, tokens round-trip, exports load, schemas are schemas."""

import json
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import jsonschema_rs
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen3ForCausalLM

from app.extraction.cases import read_cases
from assets.demo_model.recipe.evaluation.evaluate import bound_schema, read_lines
from assets.demo_model.recipe.evaluation.surround import surround
from assets.demo_model.recipe.evaluation.testset import make_lines
from assets.demo_model.recipe.prompt import extraction_messages, render_chat
from assets.demo_model.recipe.training.attention import BLOCK, attend, make_bias
from assets.demo_model.recipe.training.batches import Batch, make_batch
from assets.demo_model.recipe.training.examples import (
    DECISION_WEIGHT,
    Encoder,
    find_decisive,
    sample_example,
    share_beginning,
    write_answer,
)
from assets.demo_model.recipe.training.export import average_states, export_checkpoint, measure_shape
from assets.demo_model.recipe.training.growth import grow
from assets.demo_model.recipe.training.model import Decoder, ModelShape
from assets.demo_model.recipe.training.optimizer import Optimizer
from assets.demo_model.recipe.training.tokenizer import sample_texts, save_tokenizer, train_tokenizer
from assets.demo_model.recipe.training.train import find_layers
from assets.demo_model.recipe.writing.documents import (
    layout_line,
    layout_table,
    missing_values,
    write_document,
)
from assets.demo_model.recipe.writing.entities import point
from assets.demo_model.recipe.writing.invented import invent, make_field, name_keys
from assets.demo_model.recipe.writing.kinds import KINDS
from assets.demo_model.recipe.writing.schemas import SCHEMAS, load_schema, vary

EVALUATION = Path(__file__).parents[2] / "assets" / "demo_model" / "recipe" / "evaluation"
TINY = ModelShape(
    num_layers=2, width=32, num_heads=2, num_kv_heads=1, head_size=16, mlp_width=48, vocabulary_size=400
)
TEXTS = [
    '{"name": "Zofia Żak", "phone": null, "pros": ["a", "b"]}',
    "Meet Zofia, +49 30 12 (x@y.com), €1,200.00\n\n- ☆ ok",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(sample_texts(60, Random(1)), vocabulary_size=400)


@pytest.mark.parametrize("kind", KINDS)
def test_documents_hold_their_values_and_records_fit_their_schemas_also_varied_ones(kind: str) -> None:
    rng = Random(2)
    for _ in range(30):
        document = write_document(kind, rng)
        assert not missing_values(document.record, document.text)
        jsonschema_rs.validate(load_schema(kind), document.record)
        schema, record = vary(kind, document.record, rng)
        jsonschema_rs.validate(schema, record)
        assert list(schema["properties"]) == list(record)


def test_invented_and_pointer_records_fit_their_schema() -> None:
    rng = Random(5)
    for make in (invent, point):
        for _ in range(60):
            document, schema = make(rng)
            jsonschema_rs.validate(schema, document.record)


def test_what_an_invented_record_copies_stands_in_the_text() -> None:
    rng = Random(15)
    for _ in range(200):
        document, schema = invent(rng)
        for name, field in schema["properties"].items():
            value = document.record[name]
            if field == {"type": "string"} and value is not None:
                assert value in document.text, (name, document.text)


def test_a_key_is_nearer_to_its_own_label_than_to_any_other() -> None:
    rng = Random(16)
    for _ in range(200):
        taken: set[str] = set()
        fields = [make_field(taken, rng, is_open=True) for _ in range(6)]
        properties, record = name_keys(fields[:4], fields[4:], rng)
        assert list(record.values()) == [field.value for field in fields[:4]]
        for field, key in zip(fields, properties, strict=False):
            text = f"{key} {properties[key].get('description', '')}"
            asked = {word.lower().removesuffix("s") for word in WORD.findall(text)}
            shares = {other.label: share_words(other.label, asked) for other in fields}
            own = shares.pop(field.label)
            assert field.label.endswith(" by") or own > max(shares.values()), (key, field.label, shares)


WORD = re.compile("[A-Z]?[a-z]+")


def share_words(label: str, asked: set[str]) -> float:
    """Share of the label's words that are asked for."""
    words = [word.removesuffix("s") for word in label.split()]
    return sum(word in asked for word in words) / len(words)


def test_tables_and_lines_keep_every_label_and_value_apart() -> None:
    rng = Random(17)
    rows = [("name", "Zofia, Żak"), ("tags", "a; b | c"), ("sum", "1 and 2")]
    for _ in range(100):
        for layout in (layout_table, layout_line):
            text = layout(rows, rng).lower()
            assert all(label in text and value.lower() in text for label, value in rows)
        head, *_, values = layout_table(rows, rng).split("\n")[:2]
        joint = head.lower().strip("| ").removeprefix("name").removesuffix("sum").split("tags")[0]
        assert values.strip("| ").split(joint)[:2] == ["Zofia, Żak", "a; b | c"] or head.startswith("|")


def test_the_generated_set_depends_on_its_seed_alone() -> None:
    assert make_lines(1, seed=3) == make_lines(1, seed=3) != make_lines(1, seed=4)
    assert [json.loads(line)["kind"] for line in make_lines(1)] == list(KINDS)


def test_answers_are_default_json_with_value_spans() -> None:
    record = {"name": "Å B", "items": [1, 2], "phone": None}
    answer = write_answer(record)
    assert answer.text == json.dumps(record, ensure_ascii=False)
    assert [answer.text[begin:end] for _, begin, end in answer.values] == ['"Å B"', "[1, 2]", "null"]


def test_tokenizer_round_trips_any_text(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_names_are_cut_alike_in_prose_and_in_json(tokenizer: Tokenizer) -> None:
    prose, quoted = tokenizer.encode("of Quimbolo.").tokens, tokenizer.encode('{"a": "Quimbolo"}').tokens
    name = tokenizer.encode("Quimbolo").tokens
    for tokens in (prose, quoted):
        assert any(tokens[i : i + len(name)] == name for i in range(len(tokens)))


def test_loss_falls_on_answer_tokens_only(tokenizer: Tokenizer) -> None:
    encoder, rng = Encoder(tokenizer), Random(9)
    prompt = [{"role": "user", "content": "Fields:\n- a: string\n\nDocument:\na is b"}]
    example = encoder.extraction("invented", prompt, {"a": "b"}, key_weight=0.3)
    counted = tokenizer.decode(example.token_ids[example.weights > 0].tolist(), skip_special_tokens=False)
    assert counted == '{"a": "b"}<|im_end|>'
    assert 1.0 <= sample_example(encoder, rng).weights.max() <= DECISION_WEIGHT


def test_decisions_weigh_more_than_the_rest_of_a_copy(tokenizer: Tokenizer) -> None:
    record = {"city": "Quimbolo Falls", "tone": "negative"}
    decisive = find_decisive(
        {"properties": {"city": {"type": "string"}, "tone": {"type": "string", "enum": ["negative"]}}}
    )
    example = Encoder(tokenizer).extraction("x", [], record, key_weight=0.3, decisive=decisive)
    (_, begin, end), (_, first, last) = example.spans
    assert set(example.weights[begin : begin + 2]) == {DECISION_WEIGHT}
    assert set(example.weights[begin + 2 : end - 1]) == {1.0}
    assert set(example.weights[first:last]) == {DECISION_WEIGHT}


def test_null_weighs_as_much_as_a_string_in_its_place(tokenizer: Tokenizer) -> None:
    chosen = []
    for value in (None, "555 0101"):
        example = Encoder(tokenizer).extraction("x", [], {"phone": value}, key_weight=0.3)
        behind_key = example.spans[0][1]  # its token is the choice between them
        assert tokenizer.decode(example.token_ids[:behind_key].tolist()).endswith("phone")
        assert example.weights[behind_key] == DECISION_WEIGHT
        chosen.append(example.token_ids[behind_key])
    assert chosen[0] != chosen[1]


def test_branches_are_computed_as_if_each_stood_alone(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    model, encoder = Decoder(TINY), Encoder(tokenizer)
    texts = ("Talk by Ann in Rome", "Quiz, hosted by the Oslo Club", "Fair in Bern")
    examples = [
        encoder.extraction("event", extraction_messages(load_schema("event"), text), {"title": text}, 0.3)
        for text in texts
    ]
    shared = share_beginning(examples)
    assert len(shared.token_ids) < sum(len(example.token_ids) for example in examples) / 2

    def answers(batch: Batch) -> torch.Tensor:
        return model.logits_at(batch.token_ids, batch.positions, batch.places, batch.branches)

    with torch.no_grad():
        together = answers(make_batch([shared, sample_example(encoder, Random(1))]))
        alone = torch.cat([answers(make_batch([example])) for example in examples])
    torch.testing.assert_close(together[: len(alone)], alone, rtol=1e-4, atol=1e-4)
    for name, begin, end in shared.spans:
        assert name == "title"
        assert tokenizer.decode(shared.token_ids[begin:end].tolist()).strip('": }') in texts


def test_chat_template_renders_what_training_saw(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path)
    messages = extraction_messages(load_schema("event"), "Talk at noon")
    text = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert text == render_chat(messages, add_generation_prompt=True)


def test_export_loads_in_transformers_with_the_same_logits(tokenizer: Tokenizer, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Decoder(TINY)
    export_checkpoint(dict(model.named_parameters()), TINY, tokenizer, tmp_path, dtype=torch.float32)
    ids = torch.randint(0, TINY.vocabulary_size, (2, 33))
    loaded = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = loaded(ids).logits.reshape(-1, TINY.vocabulary_size)
        found = model.logits_at(ids, torch.arange(ids.numel()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [9, 2 * BLOCK + 37])
def test_attention_in_blocks_equals_the_fused_one_with_its_gradients(length: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 16, requires_grad=True) for heads in (4, 2, 2))
    branches = (torch.arange(length) * 4 // length).expand(2, -1) * torch.tensor([[1], [0]])
    bias, d_out = make_bias(branches), torch.randn(2, 4, length, 16)
    wide = (heads.repeat_interleave(2, 1) for heads in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, *wide, attn_mask=bias.float()[:, None])
    found = attend(q, k, v, bias)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    gradients = (torch.autograd.grad(out, (q, k, v), d_out) for out in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_no_position_sees_a_later_one_or_another_branch() -> None:
    bias = make_bias(torch.tensor([[0, 0, 1, 1, 2]]))[0]
    seen = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]
    assert (bias == 0).int().tolist() == seen


def test_a_few_steps_lower_the_loss_and_a_restored_state_goes_on_alike() -> None:
    torch.manual_seed(0)
    model = Decoder(TINY)
    optimizer = Optimizer(model)
    ids = torch.randint(0, 400, (4, 24))

    def loss() -> torch.Tensor:
        logits = model.logits_at(ids, torch.arange(ids.numel()))
        return torch.nn.functional.cross_entropy(logits, ids.reshape(-1))

    before = loss().item()
    for _ in range(5):
        loss().backward()
        optimizer.step(0.5)
    assert loss().item() < before
    other = Decoder(TINY)
    copy = Optimizer(other)
    copy.restore(optimizer.state(), optimizer.num_steps)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_the_running_mean_follows_the_masters_and_survives_a_restart() -> None:
    model = Decoder(TINY)
    optimizer = Optimizer(model)
    seen = []
    for _ in range(5):
        model.logits_at(torch.arange(24)[None], torch.arange(24)).square().mean().backward()
        optimizer.step(1.0)
        seen.append(optimizer.masters["norm.weight"].clone())
    torch.testing.assert_close(optimizer.means["norm.weight"], torch.stack(seen).mean(0))
    assert not torch.equal(seen[0], seen[-1])
    copy = Optimizer(Decoder(TINY))
    copy.restore(optimizer.state(), optimizer.num_steps)
    torch.testing.assert_close(copy.means, optimizer.means, rtol=0, atol=0)


@pytest.mark.parametrize("num_layers", [3, 4, 5])
def test_a_run_that_grows_reads_as_before_and_learns_in_all_its_layers(num_layers: int) -> None:
    torch.manual_seed(0)
    ids, places = torch.randint(0, 400, (2, 24)), torch.arange(48)
    optimizer = Optimizer(model := Decoder(TINY))
    model.logits_at(ids, places).square().mean().backward()
    optimizer.step(1.0)
    deep = Decoder(replace(TINY, num_layers=num_layers))
    grown = Optimizer(deep)
    grown.restore(grow(optimizer.state(), num_layers), optimizer.num_steps)
    torch.testing.assert_close(deep.logits_at(ids, places), model.logits_at(ids, places))
    before = {name: weight.detach().clone() for name, weight in deep.named_parameters()}
    for _ in range(2):
        torch.nn.functional.cross_entropy(deep.logits_at(ids, places), ids.reshape(-1)).backward()
        grown.step(1.0)
    assert not any(torch.equal(weight, before[name]) for name, weight in deep.named_parameters())


def test_a_grown_run_is_known_by_its_weights(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert find_layers(tmp_path) == ModelShape().num_layers
    state = grow(Optimizer(Decoder(TINY)).state(), 5)
    save_file(state, tmp_path / "state.safetensors")
    weights = average_states([tmp_path / "state.safetensors"])
    assert find_layers(tmp_path) == 5
    assert measure_shape(weights) == replace(TINY, num_layers=5)
    export_checkpoint(weights, measure_shape(weights), tokenizer, tmp_path)
    Decoder(replace(TINY, num_layers=5)).load_state_dict(weights)
    assert Qwen3ForCausalLM.from_pretrained(tmp_path).config.num_hidden_layers == 5


def test_a_run_never_shrinks() -> None:
    with pytest.raises(ValueError, match="layers=1: the run has 2"):
        grow(Optimizer(Decoder(TINY)).state(), 1)


def test_the_mean_of_states_is_that_of_their_running_means(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    for number, path in enumerate(paths):
        weight = torch.full((2, 3), 1.0 + 2 * number)
        save_file({"mean.w": weight, "master.w": weight + 1, "momentum.w": torch.zeros(2, 3)}, path)
    assert {name: weight.tolist() for name, weight in average_states(paths).items()} == {"w": [[2.0] * 3] * 2}
    save_file({"mean.w": torch.zeros(3, 2)}, paths[1])
    with pytest.raises(ValueError, match="holds other weights"):
        average_states(paths)


@pytest.mark.parametrize("path", sorted(SCHEMAS.glob("*.json")), ids=lambda path: path.stem)
def test_schemas_are_valid_json_schema(path: Path) -> None:
    schema = json.loads(path.read_text(encoding="utf-8"))
    assert jsonschema_rs.meta.is_valid(schema)
    assert schema["additionalProperties"] is False
    assert schema["required"] == list(schema["properties"])


def test_handwritten_records_fit_their_schema_and_cover_every_kind() -> None:
    documents = read_lines(EVALUATION / "handwritten.jsonl")
    assert {document["kind"] for document in documents} == set(KINDS)
    for document in documents:
        jsonschema_rs.validate(load_schema(document["kind"]), document["record"])
        assert not missing_values(document["record"], document["text"])


def test_bounded_schemas_limit_free_strings_and_lists_only() -> None:
    bounded = bound_schema(load_schema("product"))["properties"]
    assert bounded["name"]["maxLength"] == 100
    assert "maxLength" not in bounded["currency"]
    assert bounded["features"]["maxItems"] == 12


@pytest.mark.parametrize("name", ["generated", "handwritten", "samples", "unseen", "development"])
def test_every_set_fits_its_schemas(name: str) -> None:
    cases = read_cases(EVALUATION / f"{name}.jsonl")
    assert len(cases) >= 16
    for case in cases:
        assert case.record and list(case.schema["properties"]) == list(case.record)
        jsonschema_rs.validate(case.schema, case.record)


def test_other_text_stands_on_both_sides_in_the_given_amount() -> None:
    text = surround("Ada is 36.", 40, lambda part: len(part.split()), ["one two three."] * 2)
    assert text.count("one two three.") == 12 and text.split("Ada is 36.")[1].count("one two three.") == 6
    assert surround("Ada", 0, len, ["a"]) == "Ada"
