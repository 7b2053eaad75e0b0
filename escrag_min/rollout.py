"""The two-pass rollout (paper D, Algorithm 1), the same in training and at inference:

    y₀          ~ π(· | x)                         initial response to the dialogue state x
    e_1..e_n    = the n nearest exemplars to y₀    retrieval.py, by the reply part of y₀
    y_1..y_G    ~ π(· | x, y₀, e)                  final responses; reward, advantage and loss are about these

n = 0 is vanilla GRPO: one pass, y_i ~ π(· | x).

By default one y₀ serves the whole group, so that all G final responses answer the same prompt, as the group baseline
assumes (ours; the paper does not say). initial="rollout" draws one for each: then a group is G rollouts of one response.
"""
from dataclasses import asdict, dataclass

from escrag_min.chat import split_think
from escrag_min.prompts import fitted_ids, last_turn, policy_prompt
from escrag_min.runtime.args import about
from escrag_min.sampling import sample


@dataclass
class Response:
    tokens: list            # the sampled ids; training uses these, never a re-encoding of the text
    finished: bool          # False: cut at max_new_tokens
    text: str
    reasoning: str
    reply: str              # what the client sees, the reward model scores and retrieval searches for
    well_formed: bool


@dataclass
class Rollout:
    state: dict             # the record: "prompt" (messages), "id", "dialogue_id", ...
    group: int              # index of the state in the batch
    initial: Response | None
    initial_prompt: list    # ids of pass 1; empty where n = 0
    exemplars: list         # Hits in the final prompt, best first
    prompt: list            # ids of the final pass
    responses: list         # [G] Responses ([1] with initial="rollout")
    turns_dropped: int      # old turns that did not fit the final prompt

    def record(self):
        """Everything, as JSON."""
        value = asdict(self)
        value["state"] = {k: self.state[k] for k in ("id", "dialogue_id", "prompt")}
        return value


def two_pass_rollout(model, tokenizer, states, index=None, group_size=8, retrieve=3, max_new_tokens=256, temperature=1.0,
                     initial="group", prompt_limit=2048, generator=None, progress=False):
    """Roll out a batch of dialogue states.

    states          records with "prompt"
    index           ExemplarIndex; not needed where retrieve is 0
    group_size      G, final responses a state
    retrieve        n, exemplars in the final prompt; 0: one pass
    initial         "group": one initial response a state; "rollout": one for each of the G
    prompt_limit    tokens a prompt may have; the oldest turns of the dialogue are dropped to fit, then exemplars
    generator       for sampling: one, or a list of one a state: then a state's rollouts do not depend on the others
    progress        tqdm bars over the new tokens
    -> list[Rollout], the states in order; one a state, or group_size a state with initial="rollout"
    """
    if initial not in ("group", "rollout"):
        raise ValueError(f'two_pass_rollout: initial={initial!r}; allowed: "group", "rollout"')
    if retrieve < 0 or retrieve and index is None:
        raise ValueError(f"two_pass_rollout: retrieve={retrieve} needs an exemplar index and must be >= 0")
    copies = group_size if retrieve and initial == "rollout" else 1
    if retrieve == 0:
        rollouts = [Rollout(state, i, None, [], [], ids, [], dropped)
                    for i, (state, (ids, dropped)) in enumerate(zip(states, initial_prompts(tokenizer, states, prompt_limit)))]
    else:
        rollouts = first_pass(model, tokenizer, states, index, retrieve, copies, max_new_tokens, temperature, prompt_limit,
                              generator, progress)
    if isinstance(generator, list):
        generator = [generator[r.group] for r in rollouts]
    drawn = speak(model, tokenizer, [r.prompt for r in rollouts], group_size // copies, max_new_tokens, temperature, generator,
                  progress)
    for rollout, responses in zip(rollouts, drawn):         # G, or 1 each
        rollout.responses = responses
    return rollouts


def first_pass(model, tokenizer, states, index, retrieve, copies=1, max_new_tokens=256, temperature=1.0, prompt_limit=2048,
               generator=None, progress=False):
    """Pass 1 and retrieval: everything of the rollouts but their responses.

    copies      initial responses a state; each has a Rollout of its own, with the final prompt made from it
    The rest as in two_pass_rollout.
    """
    first = initial_prompts(tokenizer, states, prompt_limit)
    drawn = speak(model, tokenizer, [ids for ids, _ in first], copies, max_new_tokens, temperature, generator, progress)
    drafts = [(i, draft) for i, group in enumerate(drawn) for draft in group]
    hits = index.search([draft_text(draft) for _, draft in drafts], retrieve, [states[i]["dialogue_id"] for i, _ in drafts])
    rollouts = []
    for (i, draft), found in zip(drafts, hits):
        ids, dropped, shown = final_prompt(tokenizer, states[i]["prompt"], draft_text(draft), found, prompt_limit)
        rollouts.append(Rollout(states[i], i, draft, first[i][0], shown, ids, [], dropped))
    return rollouts


def speak(model, tokenizer, prompts, copies, max_new_tokens, temperature, generator, progress):
    """Sampled answers to prompts -> list[list[Response]], [len(prompts)][copies]"""
    completions = sample(model, prompts, copies, max_new_tokens, temperature, stop_tokens=tokenizer.stop_tokens,
                         vocab_size=len(tokenizer), generator=generator, progress=progress)
    return [[as_response(tokenizer, c) for c in group] for group in completions]


def initial_prompts(tokenizer, states, limit):
    """Pass 1's prompts -> [(ids, old turns dropped)]"""
    prompts = []
    for state in states:
        with about(f"{state['id']}, prompts of at most {limit} tokens"):
            prompts.append(fitted_ids(tokenizer, policy_prompt, state["prompt"], limit))
    return prompts


def final_prompt(tokenizer, dialogue, draft, hits, limit):
    """Pass 2's prompt -> (ids, old turns dropped, Hits shown). Where the last turn alone is too long with all exemplars, the
    least similar ones are left out; where it is too long without any, half of the draft."""
    for n in range(len(hits), -1, -1):
        exemplars = [h.exemplar for h in hits[:n]]
        try:
            ids, dropped = fitted_ids(tokenizer, lambda turns: policy_prompt(turns, draft, exemplars), dialogue, limit)
            return ids, dropped, hits[:n]
        except ValueError:
            if n == 0 and not draft:
                raise
    return final_prompt(tokenizer, dialogue, draft[:len(draft) // 2], [], limit)


def shortest_prompt(tokenizer, state, retrieve, max_new_tokens):
    """Tokens the longest prompt of a state needs at least: its last turn, and in pass 2 a draft of max_new_tokens."""
    last = last_turn(state["prompt"])
    if not retrieve:
        return len(tokenizer.render(policy_prompt(last)))
    return len(tokenizer.render(policy_prompt(last, ""))) + max_new_tokens


def as_response(tokenizer, completion):
    text = tokenizer.decode(completion.tokens)
    return Response(completion.tokens, completion.finished, text, *split_think(text))


def draft_text(draft):
    """What retrieval searches for and pass 2 shows: the reply, or the reasoning where the draft never came to one."""
    return draft.reply or draft.reasoning
