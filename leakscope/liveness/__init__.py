"""Liveness graphs: who keeps memory alive, what is only still resident, what nobody uses any more.

Tables in, tables out. :func:`leakscope.liveness.analyse.analyse` makes one graph of captures; for cache events alone,
``rows`` reads them, ``lives`` finds the lives and holds of their objects, ``moments`` what is known of them at a time,
``classes`` sorts them. Nothing is imported here: verdicts need only a part.
"""
