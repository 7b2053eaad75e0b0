"""Every prompt (paper Appendix B), in our words: the paper's roles and ingredients, not its text.

    policy, pass 1    dialogue                                              -> initial response
    policy, pass 2    dialogue + initial response + retrieved exemplars     -> final response
    reward model      dialogue, then the candidate reply as the assistant's turn

The dialogue stands in one user turn as a transcript (paper B: the user turn carries the context), so that the policy
always speaks as the therapist who prepares a reply, and text of people is data, never an instruction of its own.
"""
from escrag_min.chat import drop_old_turns

SPEAKER = {"user": "Client", "assistant": "Counselor", "system": "Note"}

POLICY_SYSTEM = (
    "You are a therapist. You help your client feel less distressed and work through what they are facing, at their pace.\n"
    "Before you speak, think between <think> and </think>, in three lines: Stage (Exploration, Comforting or Action), "
    "State (what the client feels, why, and what they need now) and Strategy (how you will respond).\n"
    "Then write only your reply to the client: warm, specific and brief. Understand before you advise. Do not lecture, "
    "judge or diagnose. If someone may be in danger, calmly point to people who can help right now.")

REWARD_SYSTEM = (
    "You judge emotional support. Read the conversation, then the counselor's reply: does it address what the client is "
    "going through emotionally?")


def transcript(dialogue):
    """[messages] -> one line a turn: "Client: ...", "Counselor: ...". """
    return "\n".join(f"{SPEAKER[m['role']]}: {m['content'].strip()}" for m in dialogue)


def policy_prompt(dialogue, initial=None, exemplars=()):
    """Messages of pass 1 (initial None) or pass 2. exemplars: records with "prompt", "chosen" and perhaps "strategy"."""
    parts = [f"The conversation so far:\n{transcript(dialogue)}"]
    if initial is not None:
        parts.append(f"Your first draft of a reply:\n{initial}")
    if exemplars:
        shown = []
        for i, e in enumerate(exemplars, start=1):
            strategy = f" ({e['strategy']})" if e.get("strategy") else ""
            shown.append(f"{i}. {transcript(e['prompt'][-1:])}\n   Counselor{strategy}: {e['chosen'].strip()}")
        parts.append("How experienced counselors replied to other clients in similar moments:\n" + "\n".join(shown))
    if initial is not None:
        parts.append("Now write your final reply to your own client. Keep what fits them, take from the examples only what "
                     "helps, and copy none.")
    else:
        parts.append("Write your next reply.")
    return [{"role": "system", "content": POLICY_SYSTEM}, {"role": "user", "content": "\n\n".join(parts)}]


def reward_prompt(dialogue):
    """Messages before the reply that is scored."""
    return [{"role": "system", "content": REWARD_SYSTEM},
            {"role": "user", "content": f"The conversation so far:\n{transcript(dialogue)}"}]


def fitted_ids(tokenizer, build, dialogue, limit):
    """ids of build(dialogue) with the oldest whole turns dropped until they are at most `limit` -> (ids, turns dropped)."""
    def render(turns):
        return tokenizer.render(build(turns), add_generation_prompt=True)
    kept, dropped = drop_old_turns(dialogue, render, limit)
    return render(kept), dropped
