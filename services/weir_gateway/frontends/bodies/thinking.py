"""What a request says of the model's reasoning, whatever its API calls that."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from weir.core.errors import FieldViolation
from weir_gateway.requests.client_request import Conversation

_NO_EFFORT = "no model here is told how long to reason"


@dataclass(frozen=True, slots=True)
class Thinking:
    """`max_tokens`: at which the model must come to its answer. `template_variables`: those of Qwen3's template and of
    others after it; one that does not ask for them goes on as it would."""

    max_tokens: int | None = None
    template_variables: Mapping[str, object] = field(default_factory=dict)

    def within(self, conversation: Conversation) -> Conversation:
        """The same with this, where it says nothing of its own."""
        variables = {**self.template_variables, **conversation.template_variables}
        return replace(conversation, max_reasoning_tokens=self.max_tokens, template_variables=variables)


AS_TRAINED = Thinking()
NO_THINKING = Thinking(0, {"enable_thinking": False})
"""The template closes the reasoning at once; where it has no way to, the budget does."""


def thinking_of_effort(
    effort: object, budget: int | None, field_name: str, instead: str, violations: list[FieldViolation]
) -> Thinking:
    """`effort`: none, or not said. `instead`: what a client can give in place of another one."""
    if effort == "none":
        if budget:
            problem = f"is none, with a budget of {budget} tokens; give one of them"
            violations.append(FieldViolation(field_name, problem))
        return NO_THINKING
    if effort is not None:
        shown = repr(effort) if isinstance(effort, str) and len(effort) < 32 else "not none"
        violations.append(FieldViolation(field_name, f"is {shown}: {_NO_EFFORT}; {instead}"))
    return AS_TRAINED if budget is None else Thinking(budget)
