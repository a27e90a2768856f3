"""floor(job): a time that no schedule for the job can beat, whatever its memory. It is what the gap is measured from."""

from __future__ import annotations

from penstock.search.job import Job


def floor(job: Job) -> float:
    """The largest of three lower bounds of the makespan.

    A rank cannot begin before the first microbatch has reached its first stage, and then has all its work to do. Of that,
    all forwards and input gradients come before the last input gradient has gone on to the stages before. And one
    microbatch alone has its way to go, there and back.
    """
    forward, back, weight, crossing = job.forward, job.backward_input, job.backward_weight, job.crossing
    placement, count = job.placement, job.num_microbatches
    bounds = [
        sum(forward) + sum(back) + 2 * sum(crossing) + weight[0],
    ]
    for rank in range(placement.num_ranks):
        stages = placement.stages_of(rank)
        first = stages[0]
        head = sum(forward[:first]) + sum(crossing[:first])
        both = count * sum(forward[stage] + back[stage] for stage in stages)
        bounds.append(head + both + count * sum(weight[stage] for stage in stages))
        tail = sum(back[:first]) + sum(crossing[:first]) + weight[0] if first else 0.0
        bounds.append(head + both + tail)
    return max(bounds)
