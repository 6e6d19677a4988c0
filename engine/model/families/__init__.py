"""The supported architectures, a file for each group of related ones."""

from engine.model.families import deepseek, gemma, glm, gpt_oss, granite, lfm2, llama, olmo, others, qwen
from engine.model.families.family import Family

FAMILIES: dict[str, Family] = {
    name: family
    for group in (llama, qwen, gemma, granite, lfm2, olmo, gpt_oss, glm, deepseek, others)
    for name, family in group.FAMILIES.items()
}
