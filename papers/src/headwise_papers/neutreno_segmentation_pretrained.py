"""NeuTRENO in a Segmenter whose encoder was trained on images before, with the method in both phases.

Nguyen et al. 2023 (arXiv 2312.00751) fine-tune on ADE20K from weights trained on ImageNet with NeuTRENO; here the
encoder of each arm and seed is first trained on CIFAR-100 with the arm's methods.
"""

from __future__ import annotations

from headwise.study import ClaimTest, Scale
from headwise_papers.neutreno_segmentation import SINGLE
from headwise_papers.neutreno_segmentation import STUDY as UNTRAINED
from headwise_papers.tasks.pretrained_scenes import PretrainedScenes
from headwise_verdict.results.records import Premise

SCRATCH = "baseline | hand_over=false"

STUDY = UNTRAINED.model_copy(
    update={
        "name": "neutreno-segmentation-pretrained",
        "title": "NeuTRENO in a Segmenter on street scenes, with a pretrained encoder",
        "question": "Does NeuTRENO raise the mean IoU of a Segmenter whose encoder was pretrained with it, with its "
        "best strength inside the range and a collapse at its end?",
        "task": PretrainedScenes(),
        "task_place": "headwise_papers.tasks.pretrained_scenes:PretrainedScenes",
        "methods": (*UNTRAINED.methods, SCRATCH),
        "premises": (
            *UNTRAINED.premises,
            Premise(
                name="pretraining helps",
                text="Pretraining raises the plain model's mean IoU",
                tests=(ClaimTest(arm="baseline", outcome=SINGLE, says="higher", against=SCRATCH),),
            ),
        ),
        "scales": {
            "small": Scale(settings={}, seeds=8),
            "paper": Scale(
                settings=UNTRAINED.scales["paper"].settings
                | {"pretrain_steps": 50_000, "pretrain_batch_size": 128, "pretrain_side": 192},
                seeds=5,
            ),
        },
        "notes": (
            "The encoder learns the classes of CIFAR-100 for 1,000 batches of 64 images, enlarged to 80 × 80 pixels, "
            "with the arm's methods and its seed; its head is dropped, and the decoder starts at random.",
            "NeuTRENO acts in the encoder, in pretraining, training and the test; the text on which this study is "
            "based does not give the strengths of the published table.",
            UNTRAINED.notes[1],
            "Paper: the published model and scales, on CamVid, pretrained on CIFAR-100. ADE20K and ImageNet are not "
            "read, so that the published fine-tuning itself is not repeated.",
        ),
    }
)
