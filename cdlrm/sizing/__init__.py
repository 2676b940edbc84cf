"""How fast a machine will train, from ids and a profile of the machine: `cdlrm plan` and `cdlrm calibrate`.

profiles   what a machine can do: GPUs from their data sheets, or this machine, measured
work       what a training step has to do: shapes, and counts of everything that costs time
traffic    rows that move with every batch, by our own planner on the ids of any source
model      seconds of every stage, how stages overlap, what limits the step
calibrate  measures this machine
answer     several cache sizes, the advice in one sentence
"""
