"""A study of the savings from low rank: language models trained with several strengths of attention decay, whose heads
are then cut to their pseudo-rank by `headwise.compress`.

Kobayashi, Akram and von Oswald 2024, arXiv 2410.23819, show that decay lowers the rank, but do not measure what the low
rank saves in storage or computation.
"""

from __future__ import annotations

from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.decay_lm import STUDY as LM
from headwise_papers.tasks.cut_character_lm import CutCharacterLM

AXIS = "baseline | attention_weight_decay={0,0.1,1,3}"
FROM = "a consequence of Kobayashi, Akram and von Oswald 2024, arXiv 2410.23819"

STUDY = Study(
    name="decay-compress",
    title="What the low rank of decayed attention saves",
    question="How many parameters and how much time does cutting every head to its pseudo-rank save, what does it "
    "cost in loss, and does decay of attention make both better?",
    task=CutCharacterLM(**LM.task.model_dump()),
    task_place="headwise_papers.tasks.cut_character_lm:CutCharacterLM",
    methods=(),
    sweeps=(AXIS,),
    premises=LM.premises,
    claims=(
        Claim(
            text="The stronger the decay of attention, the fewer parameters a cut leaves at the same share of the "
            "singular values.",
            source=FROM,
            tests=(ClaimTest(arm=AXIS, outcome="cut at 0.95/projections", says="falls"),),
        ),
        Claim(
            text="The stronger the decay of attention, the less loss the cut costs.",
            source=FROM,
            tests=(ClaimTest(arm=AXIS, outcome="cut at 0.95/lost", says="falls"),),
        ),
    ),
    scales={"small": Scale(seeds=10), "paper": LM.scales["paper"]},
    notes=(
        "Cut at s: each head's W_KᵀW_Q and W_OW_V keep the singular values whose sum is the share s of the total; "
        "without further training.",
        "Time is that of one forward of 16 windows, cut over plain, in the same process; values and scores keep the "
        "full head size.",
    ),
)
