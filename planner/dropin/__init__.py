"""What takes the place of other einsums: `einsum`, `contract_path`, `contract_expression`, and `patch`.

Other people's calling conventions live here and nowhere else. A new one is a function of `einsum.py`; it ends in a call
of `contract`.
"""
