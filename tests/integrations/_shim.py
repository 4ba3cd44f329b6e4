import hdet_kernels.schedule.with_cycle as w

W = w.WithCycle
if not hasattr(W, "in_sync"):
    W.in_sync = property(
        lambda self: (
            not self._phase
            and (not self.cycle.started or self.cycle.history.last_step == self.cycle.before + self.cycle.step)
        )
    )
if not hasattr(W, "on_sync"):

    class H:
        def remove(self):
            pass

    def on_sync(self, cb, every_process=True):
        c = self.cycle
        old = c.add_record

        def add(r):
            old(r)
            (every_process or self.cycle.ensemble.replica == 0) and cb(r)

        c.add_record = add
        return H()

    W.on_sync = on_sync
    W.metrics = lambda self: {"hdet/base/lr": next(iter(self.history[-1].base.values()))} if self.history else {}
