"""Code for CPUs in C++, one file, compiled where it is first used if a compiler is there, and never needed.

`cpu.cpp` computes, `build.py` compiles, `library.py` calls, `matrix.py` lays weights out.  What torch does
instead where there is none stands beside each caller, and is what tests compare with.
"""
