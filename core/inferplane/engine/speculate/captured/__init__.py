"""Steps that are captured together with the drafting behind them."""
