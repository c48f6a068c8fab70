"""From raw steps to claims: clocks and blocks time a training, confidence and quality decide what may be said.

    block ─▶ samples/s of one process ─▶ log ratio of one fresh pair ─▶ Interval of the speed-up
                                         losses of one paired seed   ─▶ QualityCheck

The unit of replication is a launched process or a seed, never a step. `confidence` and `quality` are pure.
"""
