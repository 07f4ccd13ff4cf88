"""What leakscope costs and how fast it is, measured beside other tools in the same run: ``make bench``.

Every figure that depends on the machine is a ratio to something measured next to it; every benchmark is run
in several rounds and told as median, lowest and highest. Bars are what the project promises; a bar that is
missed is reported, it fails nothing.
"""
