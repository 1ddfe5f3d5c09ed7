"""Chat templates: what published ones use works, and nothing else gets out of the sandbox."""

import pytest

from pdserve.errors import ConfigError, InvalidRequest
from router.chat import ChatTemplate, Message

TALK = [Message("system", "be brief"), Message("user", "hi <b>"), Message("assistant", "yes"), Message("user", "é?")]


def test_roles_contents_and_the_open_answer() -> None:
    template = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ bos_token }}<assistant>{% endif %}",
        bos_token="<s>",
        eos_token="</s>",
    )
    assert template.render(TALK) == ("<system>be brief</s><user>hi <b></s><assistant>yes</s><user>é?</s><s><assistant>")


def test_blocks_are_trimmed() -> None:
    source = "{% for m in messages %}\n    {% if m.role == 'user' %}\nU\n    {% endif %}\n{% endfor %}\n"
    assert ChatTemplate(source).render(TALK) == "U\nU\n"


def test_loop_controls_and_generation_blocks() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.role[0] }}{% endgeneration %}{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}"
    )
    assert ChatTemplate(source).render(TALK) == "ua"


def test_tojson_escapes_no_html_and_no_unicode() -> None:
    assert ChatTemplate("{{ messages[1].content | tojson }}{{ messages[3].content | tojson }}").render(TALK) == (
        '"hi <b>""é?"'
    )
    assert ChatTemplate("{{ {'a': 1} | tojson(indent=2) }}").render(TALK) == '{\n  "a": 1\n}'


def test_tools_are_absent_and_the_date_is_there() -> None:
    source = "{% if tools is none and documents is none %}{{ strftime_now('%Y') | int > 2000 }}{% endif %}"
    assert ChatTemplate(source).render(TALK) == "True"


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('only user messages') }}", "{{ messages[9].content }}", "{{ messages[0].role + 1 }}",
     "{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ 1 // 0 }}"],
)  # fmt: skip
def test_a_template_that_fails_names_the_chat_field(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source).render(TALK)
    assert caught.value.field == "chat"


def test_the_templates_own_words_reach_the_client() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(TALK)


def test_a_broken_template_is_a_config_error_with_its_line() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("ok\n{% for %}")
