"""The shared runtime: everything that cuts, moves, balances, plans, saves or restarts. It knows no recipe."""
