"""What a model's chat template supports: tools, their style (tool_template.py), and reasoning."""

from __future__ import annotations

from dataclasses import dataclass

from app.reasoning import CLOSE, supports_reasoning
from app.tool_template import read_style
from engine import InvalidRequest, Tokenizer
from grammar import ToolStyle, list_tool_styles

PROBE = "probe_of_troupe"
TOOL = {
    "type": "function",
    "function": {"name": PROBE, "description": "d", "parameters": {"type": "object", "properties": {}}},
}
USER = {"role": "user", "content": "x"}


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a chat template supports.

    Attributes:
        knows_tools: it writes tools into the prompt.
        tool_style: the style of the model's calls; None if it is unknown.
        supports_reasoning: it supports reasoning.
        hides_reasoning: the end of reasoning is a special token, which texts usually omit.
    """

    knows_tools: bool = False
    tool_style: ToolStyle | None = None
    supports_reasoning: bool = False
    hides_reasoning: bool = False


def read_template(tokenizer: Tokenizer | None, tool_style: str | None) -> TemplateFacts:
    """Try the chat template of a tokenizer.

    Args:
        tool_style: the name of the style that was set; None: the one of the template.
    """
    named = None if tool_style is None else list_tool_styles()[tool_style]
    if tokenizer is None:
        return TemplateFacts(tool_style=named)
    render = tokenizer.apply_chat_template
    try:
        knows_tools = PROBE in render([USER], tools=[TOOL])
    except InvalidRequest:
        knows_tools = False
    end = tokenizer.decode(tokenizer.encode(CLOSE, add_special_tokens=False))
    if named is None and knows_tools:
        ends = [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in tokenizer.eos_token_ids]
        source = tokenizer.describe().get("chat_template")
        named = read_style(render, [each for each in ends if each], source if isinstance(source, str) else "")
    return TemplateFacts(knows_tools, named, supports_reasoning(render), CLOSE not in end)
