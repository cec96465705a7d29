"""What a comparison looks like: tables, charts, and a page that explains them."""
