"""How fast it is, as ratios and figures of one run: `python -m bench [SUBJECT ...]`.

Each subject is a module with `run(plan)`, which yields figures; what has a limit says whether it
was met. Whatever is compared is measured back to back in alternating order, each side with memory
that was faulted in and without dirty pages, so that a virtual machine's host or a write-back that
happens to run disturbs both sides alike.
"""
