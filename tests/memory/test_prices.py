"""What saves memory is told with what it costs, and what needs less is predicted to need less."""

from __future__ import annotations

from jackline.memory.plan.choose import add_savings, plan
from jackline.memory.plan.explain import plan_json, plan_text
from jackline.memory.plan.gpus import GPU_MODELS
from jackline.memory.predict.job import StepOptions
from jackline.models.shapes import GPTShape
from tests.memory.jobs import gpt_job

LITTLE = GPTShape(2, 4, 64, context=256, vocab_size=997)


def test_every_saving_has_a_price_that_a_person_is_told() -> None:
    options = StepOptions("fp32", "foreach", is_expandable=False)
    job = gpt_job(LITTLE, length=256, global_batch=16, options=options)
    made = add_savings(job, plan(job, GPU_MODELS["T4"]))
    prices = {saving.name: saving.price for saving in made.savings}
    assert prices == {
        "micro-batch 8, accumulated 2 times": "a little speed",
        "fused AdamW": "none",
        "expandable segments": "none",
        "loss in chunks": "2 to 4 % of the time",
        "bf16 autocast": "less precise products",
        "recompute activations": "about a third more time",
    }
    text = plan_text(made, {}, is_explaining=True)
    useful = [saving for saving in made.savings if saving.saved_bytes > 0]
    assert len(useful) >= 3
    assert all(f"{saving.name} (price: {saving.price}; micro-batch " in text for saving in useful), text


def test_a_shorter_sequence_and_a_smaller_batch_need_less() -> None:
    def peak(length: int, batch: int) -> int:
        made = plan(gpt_job(LITTLE, length=length, global_batch=batch), GPU_MODELS["T4"])
        return int(plan_json(made, {})["peak_allocated_bytes"])

    assert peak(64, 8) < peak(128, 8) < peak(256, 8)
    assert peak(256, 4) < peak(256, 8)
