"""Implementations that gather the chunks a query sees and multiply them with plain matrix products."""
