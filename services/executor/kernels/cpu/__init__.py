"""The compiled CPU kernels: attention over block tables and what lies between a layer's matrix products.

``build`` compiles the C++ once for this machine and caches it; ``bindings`` loads it and gives each kernel a typed
Python face. The plain torch kernels in ``reference`` give the same results, slower, where there is no compiler.
"""
