"""Crisis signals in a client's words, and the fixed text that answers them (paper §7: safeguards, human oversight).

A list of phrases, not a judgement: it misses much and sometimes fires without need. It only routes; a model never answers.
"""
import re

HELP_TEXT = (
    "What you just wrote matters, and I would like you to talk with a person about it now, not with a program.\n"
    "If you might hurt yourself or someone else, or you are in danger, please call your local emergency number.\n"
    "You can also reach a crisis line in your country at any hour (findahelpline.com lists them), or ask someone near you "
    "to stay with you. You deserve care from people who can be there.")

NOTICE = (
    "Research software, not a counselor: it can be wrong, it keeps no watch over you, and it is no substitute for professional "
    "help. If you are in crisis, please contact your local emergency number or a crisis line.")

_SIGNALS = re.compile("|".join((
    # direct
    r"\b(?:(?:kill|hang|shoot|drown|hurt|harm)(?:ing)?|cut(?:ting)?) my ?self\b", r"\bsuicid\w*",
    r"\bend(?:ing)? (?:my (?:own )?life|it all)\b", r"\b(?:want|wanna|going|gonna|ready)(?: to)? end it\b(?! with)",
    r"\bwant it all to (?:end|stop|be over)\b",
    r"\btak(?:e|ing) my (?:own )?life\b", r"\b(?:want|wanted|wish(?:ed)?|going|ready|like) to (?:die|be dead)\b",
    r"\bwanna (?:die|be dead)\b", r"\bbetter off dead\b", r"\b(?:been|started|start|keep|kept) cutting again\b",
    r"\bself[- ]?harm\w*", r"\boverdos\w*", r"\bi(?:'d| would) rather be dead\b", r"\bwish i (?:was|were) dead\b",
    # indirect
    r"\b(?:don't|do not|didn't|never) (?:really )?want to (?:be here|wake up|live|exist|be alive)\b",
    r"\bno (?:reason|point) (?:to|in) (?:live|living|go on|going on|be alive|being alive)\b", r"\bnot worth living\b",
    r"\b(?:better|easier) (?:off )?(?:without me|if i (?:was|were) ?(?:n't|not|just)? ?(?:gone|dead|here|there|around))\b",
    r"\bif i (?:just )?(?:wasn't|weren't|was not|were not) (?:here|there|around|alive|in the picture)\b",
    r"\b(?:not|never) wak(?:e|ing) up\b(?! (?:late|early|on time|in time))", r"\bcan't (?:go on|keep living)\b",
    r"\bsay(?:ing)? goodbye to everyone\b", r"\bplanned anything (?:past|after|beyond)\b",
    r"\b(?:gave|giving|given) (?:away )?(?:all )?(?:my|the) (?:dog|cat|pets?|things|books|clothes|bike)(?: away| to my)\b",
    r"\b(?:gave|giving|given) away (?:all )?my things\b", r"\bgave my (?:flatmate|friend|brother|sister|neighbou?r) my\b",
    # danger from others
    r"\b(?:he|she|they)(?:(?:'s| is| are|'re)? (?:going to|gonna)| will|'ll| threatened to| tried to) kill me\b",
)), re.IGNORECASE)
_IDIOMS = re.compile(
    r"\b(?:job|work|boss|homework|suspense|commute|heat|diet|back|feet|head|traffic|waiting|it|that|this)"
    r"(?:'s| is| was)? killing me\b|"
    r"\b(?:dying|dead) (?:to|of|from|tired|serious|laughing)\b|\b(?:laugh\w*|bored|embarrassed|scared) (?:me )?to death\b|"
    r"\bcut(?:ting)? myself (?:shaving|cooking|some slack|off|a (?:slice|piece|break|deal))\b", re.IGNORECASE)


def crisis_signal(text):
    """The words in a client's text that point to a crisis, or None. Idioms ("this job is killing me") are no signal."""
    found = _SIGNALS.search(_IDIOMS.sub(" ", text.replace("’", "'")))
    return found and found[0]
