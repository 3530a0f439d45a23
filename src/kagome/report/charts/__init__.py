"""Charts: the numbers of each, which ``templates/charts.html`` draws as inline SVG."""
