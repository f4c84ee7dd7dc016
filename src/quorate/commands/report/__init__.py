"""Reports: one or two run directories as one HTML file.

run_history   what a run directory holds, read line by line
sessions      the fits of a run on one time axis, without the pauses between them
marks         events with their places on that axis
comparison    what differs between two runs
charts, svg   curves and events, drawn by matplotlib
page, style   HTML and its style sheet
"""
