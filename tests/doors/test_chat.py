"""Chat templates, against transformers: the same text, the same ids, and a clear refusal of what is no chat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from slipstream.doors.chat import ChatTemplate
from slipstream.doors.text import TextCodec
from slipstream.errors import InvalidRequest
from slipstream.models.store import ModelNotFound, resolve

CHAT = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Name a colour.\n"},
    {"role": "assistant", "content": "Blue <|im_end|> {{ messages }}"},
    {"role": "user", "content": "Another, with é and 猫?"},
]
# Written in the manner of Llama 2: it begins with the token that its tokenizer would add, and wants turns to alternate.
ALTERNATING = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}
{% endif %}
{% if loop.last %}{% continue %}{% endif %}
[{{ message['role'] }}] {{ message['content'] | trim }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"""


@pytest.fixture(scope="module")
def demo_model() -> Path:
    try:
        return resolve("smollm2-135m")
    except ModelNotFound:
        pytest.skip("needs the demo model: make model")


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_demo_models_prompts_are_those_of_transformers(demo_model: Path, count: int) -> None:
    """With and without a system turn, for the answer to a user and after an assistant; and no token comes twice."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    codec = TextCodec(demo_model, 8192)
    for messages in (CHAT[:count], CHAT[1 : count + 1]):
        text = ChatTemplate(demo_model).render(messages)
        assert text == tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = codec.encode(text.encode(), "messages", add_special_tokens=False)
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids == expected
        assert text.endswith("<|im_start|>assistant\n")


def save_tokenizer(folder: Path, adds_bos: bool, template: str) -> Path:
    """A token for each byte, and one for the beginning of a sequence, which the tokenizer adds itself or does not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    if adds_bos:
        bos = ("<s>", tokenizer.token_to_id("<s>"))
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("template_has_bos", [True, False])
@pytest.mark.parametrize("tokenizer_adds_bos", [True, False])
def test_a_chat_begins_as_its_template_says_whatever_the_tokenizer_adds(
    tmp_path: Path, template_has_bos: bool, tokenizer_adds_bos: bool
) -> None:
    """TPL-02: the ids are those of transformers in all four combinations; never two beginnings, and none made up."""
    turns = "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    template = "{{ bos_token }}" * template_has_bos + turns + "{% if add_generation_prompt %}[assistant]{% endif %}"
    folder = save_tokenizer(tmp_path, tokenizer_adds_bos, template)
    codec, tokenizer = TextCodec(folder, 512), AutoTokenizer.from_pretrained(folder)
    bos = tokenizer.bos_token_id
    assert (codec.encode(b"x", "text_input")[0] == bos) == tokenizer_adds_bos
    ids = codec.encode(ChatTemplate(folder).render(CHAT).encode(), "messages", add_special_tokens=False)
    assert ids == tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ids.count(bos) == template_has_bos
    assert (ids[0] == bos) == template_has_bos
    assert codec.decode(ids).endswith("[assistant]")


def folder_with(tmp_path: Path, template: Any) -> Path:
    config = {"bos_token": {"content": "<s>", "special": True}, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_template_in_the_configuration_has_its_tokens_and_may_refuse(tmp_path: Path) -> None:
    template = ChatTemplate(folder_with(tmp_path, ALTERNATING))
    turns = [{"role": role, "content": " a "} for role in ("user", "assistant", "user")]
    assert template.render(turns).replace("\n", "") == "<s>[user] a[assistant] a>"
    with pytest.raises(InvalidRequest, match="the model's chat template says: roles must alternate"):
        template.render(turns[1:])


def test_of_several_templates_the_default_is_taken_and_a_file_before_them(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    assert ChatTemplate(folder_with(tmp_path, several)).render(CHAT) == "default"
    (tmp_path / "chat_template.jinja").write_text("{{ messages | tojson }}")
    assert json.loads(ChatTemplate(tmp_path).render(CHAT)) == CHAT


def test_a_template_can_reach_nothing_outside(tmp_path: Path) -> None:
    for attack in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ 1 / 0 }}",
    ):
        with pytest.raises(InvalidRequest, match="chat template"):
            ChatTemplate(folder_with(tmp_path, attack + "{{ missing.thing }}")).render(CHAT)


def test_a_model_without_a_template_or_with_a_broken_one_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="the model's chat template cannot be read"):
        ChatTemplate(folder_with(tmp_path, "{% for %}")).render(CHAT)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(InvalidRequest, match="the model has no chat template"):
        ChatTemplate(tmp_path).render(CHAT)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("hello", "a list of 1 to 1024 objects"),
        ([], "a list of 1 to 1024 objects"),
        ([CHAT[0]] * 1025, "a list of 1 to 1024 objects"),
        (["hello"], r"messages\[0\] must be an object with exactly role and content"),
        ([CHAT[0], {"role": "user"}], r"messages\[1\] must be an object"),
        ([{**CHAT[0], "name": "x"}], r"messages\[0\] must be an object"),
        ([{"role": "tool", "content": "x"}], r"messages\[0\].role is 'tool'; allowed are system, user, assistant"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\].content must be a string"),
        ([{"role": "user", "content": None}], r"messages\[0\].content must be a string"),
    ],
)
def test_what_is_no_chat_is_refused_with_its_place(tmp_path: Path, messages: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        ChatTemplate(folder_with(tmp_path, "x")).render(messages)
