"""Requests of random tokens, which arrive over time."""

import random

from serving.request import Request, arrivals
from states.models import VOCABULARY

LONGEST_PROMPT = 40
MEAN_GAP = 1.5


def make_requests(count: int, limit: int, seed: int) -> list[Request]:
    """Prompts of random tokens and lengths, which arrive over time and want `limit` tokens or somewhat fewer."""
    chance = random.Random(seed)
    requests: list[Request] = []
    for number, arrival in enumerate(arrivals(count, MEAN_GAP, seed)):
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, LONGEST_PROMPT))]
        wanted = chance.randint((limit + 1) // 2, limit)
        requests.append(Request(number=number, prompt="", prompt_ids=prompt, arrival=arrival, limit=wanted))
    return requests
