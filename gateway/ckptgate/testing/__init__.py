"""For tests of ckptgate and of third parties' adapters: contract suites, faults, a manual clock."""
