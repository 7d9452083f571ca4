// The browser's own tooltip waits a second; this one does not. Without script the titles still work.
const tip = document.getElementById("tip");
document.addEventListener("pointerover", (event) => {
  const token = event.target.closest(".tokens .t");
  tip.hidden = !token;
  if (!token) return;
  if (token.title) {
    token.dataset.tip = token.title;
    token.removeAttribute("title");
  }
  tip.textContent = token.dataset.tip;
  const boxes = [...token.getClientRects()];
  const box = boxes.find((b) => event.clientY >= b.top && event.clientY <= b.bottom) || boxes[0];
  const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  tip.style.left = `${Math.max(8, left) + scrollX}px`;
  const above = box.top - tip.offsetHeight - 4;
  tip.style.top = `${(above < 4 ? box.bottom + 4 : above) + scrollY}px`;
});
